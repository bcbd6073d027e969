"""All that a controller script sees: `Trainer`, `Generator`, `Env`. Anything with these methods can stand in.

Every method raises `ValueError` for a caller's mistake, naming field, value and what is accepted, with all state as it
was; a process that died raises `controller.errors.MeshError`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rl.types import AdamParams, Completion, Datum, ForwardBackwardOutput, OptimStepOutput, PullMode, SamplingParams

Prompt = str | Sequence[Mapping[str, str]]
"""Text that the model continues as it stands, or a chat: messages with `role` and `content`, put through the model's
chat template. A last message of the role "assistant" is an answer begun, which the model goes on with."""


class Trainer(Protocol):
    """Owns parameters, gradients and optimizer state. Executes calls in the order in which they were issued."""

    async def forward_backward(
        self, batch: Sequence[Datum], loss: str | Callable[..., Any], loss_config: Mapping[str, Any] | None = None
    ) -> ForwardBackwardOutput:
        """Adds the gradient of the loss, summed over all tokens of the batch, to the accumulated gradient."""
        ...

    async def forward(self, batch: Sequence[Datum], *, entropy: bool = False) -> ForwardBackwardOutput:
        """Log-probs of the batch's target tokens; leaves no gradient."""
        ...

    async def optim_step(self, params: AdamParams, grad_scale: float = 1.0) -> OptimStepOutput:
        """Multiplies the accumulated gradient by `grad_scale`, clips it, applies an AdamW step, clears the gradient."""
        ...

    async def push_model_state_dict(self) -> int:
        """Publishes the current weights in the generator's dtype; returns their policy version."""
        ...

    async def save_checkpoint(self, path: Path) -> None:
        """Writes model, optimizer, random state and version; `path` appears only once all of it is on disk."""
        ...

    async def load_checkpoint(self, path: Path) -> int:
        """Restores what `save_checkpoint` wrote and drops any accumulated gradient; returns the policy version."""
        ...

    async def export_hf(self, path: Path) -> None:
        """Writes a directory that transformers and vLLM load."""
        ...


class Generator(Protocol):
    """Samples tokens under one policy version at a time."""

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1
    ) -> list[Completion]:
        """Samples `num_samples` completions of one prompt. Calls in flight together are batched continuously."""
        ...

    async def pull_model_state_dict(
        self, version: int, *, mode: PullMode = "drain", keep_prefix_cache: bool = False
    ) -> None:
        """Takes exactly this version of the policy; `Completion.versions` says which token came from which.

        With "drain", running requests finish first, under the weights they began with, and later ones wait. With
        "inflight", running requests go on under the new weights from their next token; what attention keeps of their
        earlier tokens is computed again, so that log-probs are those of the new weights. `keep_prefix_cache` spares
        that, for new prompts that share a prefix as well: faster, and log-probs are then of a mixture of versions.
        """
        ...


class Problem(Protocol):
    """One prompt and the means to score an answer to it."""

    @property
    def id(self) -> str:
        """Unique within the environment; the same text and answer always have the same id."""
        ...

    @property
    def prompt(self) -> Prompt:
        """What the policy is asked."""
        ...

    def reward(self, completion: str) -> float:
        """The reward of an answer, finite. Called once per completion."""
        ...


class Env(Protocol):
    """A source of problems with a training and a held-out split that never overlap."""

    @property
    def name(self) -> str:
        """What a reader of the metrics sees."""
        ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer, besides the model's own end token."""
        ...

    def train_problems(self, seed: int, start: int, count: int) -> Sequence[Problem]:
        """Problems number start to start + count - 1 of the training stream that `seed` names; streams are endless."""
        ...

    def heldout_problems(self, count: int) -> Sequence[Problem]:
        """The first `count` held-out problems, always the same."""
        ...
