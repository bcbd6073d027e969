"""The generator's side as a part of its engine. Imports neither torch nor vLLM, for the controller."""

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from generator.engine_part import EnginePart
from ownloop_bitwise.library import bfloat16_path, check_one_path
from ownloop_bitwise.shape import DTYPES, check_host, read_shape, refused_on_gpus

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from rl.protocols import Schedule
    from rl.weights.version import VersionRecord

_ONE_VALUE: Mapping[str, tuple[object, str]] = {
    "tensor_parallel": (1, "ranks would add parts of a product; use num_replicas"),
    "head_dtype": (None, "logits are computed in dtype"),
    "routes": (False, "there are no kernels for experts"),
}


class BitwiseGenerator(EnginePart):
    """Has vLLM compute by the kernels, as the engine `bitwise` does."""

    def check(self) -> None:
        """Raises ValueError for what has no kernels, and for a host that cannot run them."""
        for name, (accepted, reason) in _ONE_VALUE.items():
            if (found := getattr(self.config, name)) != accepted:
                raise ValueError(
                    f"GeneratorConfig.{name} is {found!r}; with numerics 'bitwise' it must be {accepted!r}: {reason}"
                )
        if self.config.dtype not in DTYPES:
            raise ValueError(
                f"GeneratorConfig.dtype is {self.config.dtype!r}; with numerics 'bitwise' it must be one of {DTYPES}"
            )
        if "attention_backend" in self.config.engine_args:
            raise ValueError(
                "GeneratorConfig.engine_args['attention_backend'] is set; with numerics 'bitwise', which brings its "
                "own attention, it must be left out"
            )
        read_shape(self.config.model)
        check_host(self.has_gpu)
        if self.has_gpu:
            self._check_gpu()

    def _check_gpu(self) -> None:
        if self.config.lora is not None:
            raise refused_on_gpus("GeneratorConfig.lora", self.config.lora, "train all weights")
        if self.config.speculation is not None:
            raise refused_on_gpus("GeneratorConfig.speculation", self.config.speculation, "sample without drafts")
        if not self.config.engine_args.get("enforce_eager", True):
            raise ValueError(
                "GeneratorConfig.engine_args['enforce_eager'] is False; with numerics 'bitwise' it must be True: a "
                "compiler computes in another order"
            )

    def env(self) -> Mapping[str, str]:
        """See `EnginePart`."""
        return {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"} if self.has_gpu else {}

    def engine_args(self) -> Mapping[str, object]:
        """See `EnginePart`."""
        return {"attention_backend": "TRITON_ATTN", "enforce_eager": True} if self.has_gpu else {}

    def before_build(self) -> None:
        """See `EnginePart`."""
        if self.has_gpu:
            from ownloop_bitwise.cuda import prepare  # imports vLLM

            prepare()

    def after_build(self, engine: "LLMEngine") -> None:
        """Replaces what the engine computes with."""
        from ownloop_bitwise.generator import compute_bitwise

        compute_bitwise(engine, read_shape(self.config.model))

    def check_version(self, record: "VersionRecord") -> None:
        """Raises ValueError for a trainer that multiplies by another path than this process."""
        path, _, where = record.arithmetic.partition(" in ")
        if not path and not self.has_gpu:
            return
        ours = bfloat16_path()
        if self.has_gpu:
            from ownloop_bitwise.cuda import prepare

            ours = prepare()
        check_one_path({where or "the trainer": path or "a CPU", f"the generator on {socket.gethostname()}": ours})

    @staticmethod
    def schedule(config: object) -> "Schedule":
        """See `EnginePart`."""
        from ownloop_bitwise.schedule import RunSchedule

        return RunSchedule(config)
