"""Returns the experts that a mixture's layers chose on the CPU: a patch of vLLM 0.32.

The families of mixtures name it. Nothing is patched when this module is imported. vLLM's scheduler and outputs pass
routes on, and its connector captures them in each layer, also for cached prompts. Only its runner for GPUs, which needs
Triton, drives the connector; here the runner for the CPU does:

    execute_model: connector.begin_step -> layers capture -> prepare_output
    sample_tokens: process_output -> scheduler -> outputs
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from generator.cpu.sampler import sample_with_kept_sets

execute_model = GPUModelRunner.execute_model


def patch_routes() -> None:
    """Has the CPU return routes where `enable_return_routed_experts` asks for them; `options` checks what that needs.

    Remove when vLLM supports that option on the CPU.
    """
    setattr(VllmConfig, "_verify_aux_output_compatibility", _accept)  # noqa: B010
    for name, method in (("execute_model", _execute_model), ("sample_tokens", _sample_tokens)):
        setattr(CPUModelRunner, name, method)


def _accept(self: VllmConfig) -> None:
    del self


def _execute_model(self: Any, scheduler_output: Any, *rest: Any, **options: object) -> Any:
    """vLLM's own method. What the layers have captured of a step waits for its tokens in `self.pending_routes`."""
    self.pending_routes = None
    if not self.vllm_config.aux_output_config.enabled:
        return execute_model(self, scheduler_output, *rest, **options)
    if not hasattr(self, "aux_output_connector"):
        self.aux_output_connector = get_aux_output_connector(self.model, self.vllm_config, self.kv_cache_config)
    self.aux_output_connector.begin_step(scheduler_output.aux_output_connector_metadata)
    output = execute_model(self, scheduler_output, *rest, **options)
    if scheduler_output.total_num_scheduled_tokens:
        batch = self.input_batch
        names = batch.req_ids[: batch.num_reqs]
        counts = [scheduler_output.num_scheduled_tokens[name] for name in names]
        step: Any = SimpleNamespace(
            req_ids=names,
            query_start_loc_np=np.cumsum([0, *counts]),
            num_computed_tokens_np=batch.num_computed_tokens_cpu[: batch.num_reqs].copy(),
        )
        self.pending_routes = self.aux_output_connector.prepare_output(step)
    return output


def _sample_tokens(self: Any, grammar_output: object) -> Any:
    """`sample_with_kept_sets`, and the routes of the step in its output."""
    pending, self.pending_routes = self.pending_routes, None
    output = sample_with_kept_sets(self, grammar_output)
    if pending is not None:
        sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
        pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
        output.aux_output_connector_output = pending.process_output()
    return output
