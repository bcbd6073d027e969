"""Python imports this at its start where the folder is in PYTHONPATH. It has torch compute on the pretended GPU.

Nothing happens until the process imports torch itself; tests.gpu_pretended.device then takes over.
"""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from after_import import AfterImport


def _compute(torch: ModuleType) -> None:
    del torch
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.gpu_pretended.device import install

    install(computes=os.environ["PRETENDED_GPU"] == "computed")


def _find_runtime(cuda_wrapper: Any) -> None:
    """VLLM's sleep looks for the real runtime by its path, and would pass the preloaded one by."""
    cuda_wrapper.find_loaded_library = lambda _: os.environ["LD_PRELOAD"]


def _cut_without_triton(topk_topp_sampler: Any) -> None:
    """Triton's interpreter cannot run the kernel for top-k and top-p."""
    topk_topp_sampler.HAS_TRITON = False


def _plain_experts(triton_moe: Any) -> None:
    """Its kernels take minutes in Triton's interpreter."""
    from tests.gpu_pretended.vllm_kernels import experts

    triton_moe.TritonExperts.apply = experts


def _dot_by_element(interpreter: Any) -> None:
    """As a tensor core does, and BLAS does not, an element follows from its row and its column alone."""
    import numpy as np

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar == interpreter.tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        return handle.data.astype(np.float32)

    def create_dot(_: Any, a: Any, b: Any, total: Any, *__: Any) -> Any:
        found = total.data + np.einsum("...ik,...kj->...ij", wide(a), wide(b))
        return interpreter.TensorHandle(found, total.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _measure_little(matrix_rate: Any) -> None:
    """The rate of a pretended GPU is of no use, and takes half a minute."""
    matrix_rate._SIZES["cuda"] = 64


def _have_a_driver(host_agent: Any) -> None:
    """A host without a driver's file is not asked for its GPUs."""
    host_agent._GPU_DRIVERS = ("/",)


if os.environ.get("PRETENDED_GPU"):
    AfterImport("torch", _compute)
    AfterImport("triton.runtime.interpreter", _dot_by_element)
    AfterImport("trainer.matrix_rate", _measure_little)
    AfterImport("ownloop_hosts.host_agent", _have_a_driver)
    AfterImport("vllm.v1.sample.ops.topk_topp_sampler", _cut_without_triton)
    AfterImport("vllm.model_executor.layers.fused_moe.experts.triton_moe", _plain_experts)
    AfterImport("vllm.distributed.device_communicators.cuda_wrapper", _find_runtime)
