"""vLLM's own offline interface in a process of its own, in a module that Monarch's processes can import."""

import time
from collections.abc import Sequence
from typing import Any

from monarch.actor import Actor, endpoint

_KV_CACHE_BYTES = 1 << 30  # on the CPU vLLM would reserve nearly all of the host's memory for keys and values


class OfflineGenerator(Actor):
    """`vllm.LLM` with its default settings."""

    def __init__(self, model: str, dtype: str, max_model_len: int, max_num_seqs: int) -> None:
        """Loads the model."""
        from vllm import LLM
        from vllm.platforms import current_platform

        # On a CPU a prompt that is cut ends vLLM, if its request has a seed.
        options: dict[str, Any] = {"enable_chunked_prefill": False} if current_platform.is_cpu() else {}

        self._llm = LLM(
            model=model,
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache_memory_bytes=_KV_CACHE_BYTES,
            gpu_memory_utilization=0.4,  # the other side is on the same GPU
            **options,
        )

    @endpoint
    async def tokens_per_second(
        self, prompts: Sequence[Sequence[int]], answers: int, max_tokens: int, seed: int
    ) -> float:
        """Samples completions of every prompt, all at once; returns the rate of new tokens."""
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(n=answers, max_tokens=max_tokens, temperature=1.0, seed=seed)
        tokens = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        begin = time.perf_counter()
        outputs = self._llm.generate(tokens, sampling, use_tqdm=False)
        num_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        return num_tokens / (time.perf_counter() - begin)
