"""vLLM's own offline interface in a process of its own, in a module that Monarch's processes can import."""

import time
from collections.abc import Sequence

from monarch.actor import Actor, endpoint

_KV_CACHE_BYTES = 1 << 30  # on the CPU vLLM would reserve nearly all of the host's memory for keys and values


class OfflineGenerator(Actor):
    """`vllm.LLM` with its default settings."""

    def __init__(self, model: str, dtype: str, max_model_len: int) -> None:
        """Loads the model."""
        from vllm import LLM

        self._llm = LLM(
            model=model,
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            max_model_len=max_model_len,
            kv_cache_memory_bytes=_KV_CACHE_BYTES,
        )

    @endpoint
    async def tokens_per_second(self, prompts: Sequence[Sequence[int]], max_tokens: int, seed: int) -> float:
        """Samples one completion of every prompt, all at once; returns the rate of new tokens."""
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed)
        tokens = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        begin = time.perf_counter()
        outputs = self._llm.generate(tokens, sampling, use_tqdm=False)
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return num_tokens / (time.perf_counter() - begin)
