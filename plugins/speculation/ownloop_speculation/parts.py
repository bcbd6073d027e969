"""The parts of a generator's engine that draft.

The controller imports this module, so it imports neither torch nor vLLM.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from generator.config import Speculation
from generator.engine_part import EnginePart
from rl.system.hf_config import read_config, vision_of

if TYPE_CHECKING:  # the imports would load vLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    from ownloop_speculation.drafter import Drafter

_RECURRENT = ("linear_num_key_heads", "mamba_d_state", "mamba_num_heads", "ssm_state_size", "state_size", "lru_width")
"""Settings that only models with recurrent layers have."""


class HistoryDrafts(EnginePart):
    """`Speculation.source` "history": drafts from completions of the same prompt."""

    own_only = False
    _drafter: "Drafter"

    @property
    def _speculation(self) -> Speculation:
        assert self.config.speculation is not None
        return self.config.speculation

    def check(self) -> None:
        """See `EnginePart`."""
        for reason in self._reasons():
            raise ValueError(f"GeneratorConfig.speculation is {self._speculation.source!r} and must be None: {reason}")

    def _reasons(self) -> list[str]:
        model = read_config(self.config.model)
        found = next((name for name in _RECURRENT if model.get(name)), None)
        reasons = {
            "it is not proven on GPUs": self.has_gpu,
            "it is not proven with routes, and GeneratorConfig.routes is True": self.config.routes,
            f"it is not proven with images, which {self.config.model.name} reads": vision_of(model) is not None,
            f"it is not proven with recurrent layers, and {self.config.model.name} has {found}": found is not None,
        }
        return [reason for reason, holds in reasons.items() if holds]

    def engine_args(self) -> Mapping[str, object]:
        """See `EnginePart`."""
        return {
            "speculative_config": {
                "method": "custom_class",
                "model": "ownloop_speculation.drafter.Drafter",
                "num_speculative_tokens": self._speculation.max_draft,
            }
        }

    def after_build(self, engine: "LLMEngine") -> None:
        """See `EnginePart`."""
        from ownloop_speculation.history import History

        runner: Any = engine.model_executor.driver_worker.model_runner  # pyright: ignore[reportAttributeAccessIssue]
        self._drafter = runner.drafter
        self._drafter.attach(
            engine, self._speculation, History(max_tokens=self._speculation.max_kept_tokens, own_only=self.own_only)
        )

    def take_metrics(self) -> Mapping[str, float]:
        """See `EnginePart`."""
        return self._drafter.take_metrics()


class NgramDrafts(HistoryDrafts):
    """`Speculation.source` "ngram": drafts from the prompt and the completion itself."""

    own_only = True
