"""The patches of vLLM for CPUs and GPUs alike. Written against vLLM 0.32; others, for CPUs, are in `generator/cpu/`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.v1.outputs import SamplingMaskLists


def patch_masks() -> None:
    """Has vLLM leave kept words in arrays.

    It makes a Python number of each, which takes 36 bytes: 2.2 GB for 256 samples of 4,000 tokens of 60 words. With the
    patch, `SamplingMask.token_ids` holds a `SamplingMaskLists` for each step.

    Remove when vLLM returns arrays.
    """
    SamplingMaskLists.to_nested_list = _in_one


def _in_one(self: SamplingMaskLists) -> list[Any]:
    return [self]


def patch_prompt_logprobs(runner: Any) -> None:
    """Has a model runner score every prompt with the adapter of its own request.

    vLLM computes the logits of prompts while its kernels still have the adapters of the step's samples, row by row. An
    adapter of the output projection is then missing from its own prompts, and added to other prompts.

    Remove when `tests/generator/test_prompt_logprobs.py` passes without it.
    """
    original: Callable[..., dict[str, Any]] = runner._get_prompt_logprobs_dict

    def one_by_one(hidden_states: torch.Tensor, num_scheduled_tokens: Mapping[str, int]) -> dict[str, Any]:
        wanted: dict[str, int] = runner.num_prompt_logprobs
        scored: dict[str, Any] = {}
        try:
            # Ranks gather logits together, so all take requests in one order: that in which they were scheduled.
            for name in [name for name in wanted if name in num_scheduled_tokens]:
                request = runner.requests[name]
                remaining = len(request.prompt_token_ids or ()) - request.num_computed_tokens - 1
                num_rows = min(num_scheduled_tokens[name], remaining)
                if num_rows > 0:
                    lora = request.lora_request
                    rows = (lora.lora_int_id if lora else 0,) * num_rows
                    runner._set_active_loras(rows, rows, {lora} if lora else set())
                runner.num_prompt_logprobs = {name: wanted[name]}
                scored |= original(hidden_states, num_scheduled_tokens)
                if not runner.num_prompt_logprobs:  # this was its last part
                    del wanted[name]
        finally:
            runner.num_prompt_logprobs = wanted
        return scored

    runner._get_prompt_logprobs_dict = one_by_one
