"""The patches of vLLM for CPUs and GPUs alike. Written against vLLM 0.32; others, for CPUs, are in `generator/cpu/`."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplingMaskLists


def patch_masks() -> None:
    """Has vLLM leave kept tokens in arrays.

    It makes a Python number of each, which takes 36 bytes: 2.2 GB for 256 samples of 4,000 tokens of 60 kept ids. With
    the patch, `SamplingMask.token_ids` holds a `SamplingMaskLists` for each step.

    Remove when vLLM returns arrays.
    """
    SamplingMaskLists.to_nested_list = _in_one


def _in_one(self: SamplingMaskLists) -> list[Any]:
    return [self]


def patch_prompt_logprobs(runner: object) -> None:
    """Has a model runner score every prompt with the adapter of its own request.

    vLLM computes the logits of prompts while its kernels still have the adapters of the step's samples, row by row. An
    adapter of the output projection is then missing from its own prompts, and added to other prompts.

    Remove when `tests/generator/test_prompt_logprobs.py` passes without it.
    """
    if hasattr(runner, "_get_prompt_logprobs_dict"):
        _patch_first_runner(runner)
    else:
        _patch_second_runner(runner)


def _patch_second_runner(runner: Any) -> None:
    """The one for GPUs scores all tokens of a step, in pieces, and picks the prompts' tokens afterwards."""
    worker = runner.prompt_logprobs_worker
    original: Callable[..., dict[str, LogprobsTensors]] = worker.compute_prompt_logprobs

    def by_adapters(
        compute_logits: Callable[[torch.Tensor], torch.Tensor], hidden_states: torch.Tensor, batch: Any, *rest: object
    ) -> dict[str, LogprobsTensors]:
        _, of_tokens, active = runner.lora_state.make_lora_inputs(
            batch.req_ids, batch.idx_mapping_np, batch.num_scheduled_tokens
        )
        left = iter(of_tokens)

        def logits(rows: torch.Tensor) -> torch.Tensor:
            of_rows = tuple(itertools.islice(left, len(rows)))
            runner._set_active_loras(of_rows, of_rows, active)
            return compute_logits(rows)

        return original(logits, hidden_states, batch, *rest)

    worker.compute_prompt_logprobs = by_adapters


def _patch_first_runner(runner: Any) -> None:
    """The one for CPUs scores the prompts of a step one after the other."""
    original: Callable[..., dict[str, LogprobsTensors | None]] = runner._get_prompt_logprobs_dict

    def one_by_one(
        hidden_states: torch.Tensor, num_scheduled_tokens: Mapping[str, int]
    ) -> dict[str, LogprobsTensors | None]:
        wanted: dict[str, int] = runner.num_prompt_logprobs
        scored: dict[str, LogprobsTensors | None] = {}
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
