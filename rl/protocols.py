"""All that a controller script sees: `Trainer`, `Generator`, `Env`. Anything with these methods can stand in.

Every method raises `ValueError` for a caller's mistake, naming field, value and what is accepted, with all state as it
was; a process that died raises `controller.meshes.errors.MeshError`.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
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

    async def save_checkpoint(self, path: Path, *, asynchronous: bool = False) -> None:
        """Writes model, optimizer, random state and version; `path` appears only once all of it is on disk.

        With `asynchronous` returns once the state is copied; `wait_for_checkpoint` waits for the rest.
        """
        ...

    async def wait_for_checkpoint(self) -> None:
        """Returns once no checkpoint is being written; raises what the last asynchronous one raised."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """An environment's answer that asks for another turn of the model."""

    messages: Prompt
    """What the model is told: text if the problem's prompt is text, otherwise the new messages."""
    reward: float = 0.0
    """The episode's reward if it ends here, because the context has no room for another turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """An environment's answer that ends the episode."""

    reward: float
    """The episode's reward, finite."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """What else is worth a number, averaged over a step by name."""


Reply = Observation | Done


class Episode(Protocol):
    """One attempt at a problem."""

    def reply(self, completion: str) -> Reply | Awaitable[Reply]:
        """Takes in what the model said, and answers.

        A plain function runs in a thread, so it may compute or block, at the same time as others of other episodes. An
        `async def` runs on the event loop and must not block it. What raises, takes longer than the loop's limit or
        returns a reward that is not finite costs this rollout and is reported; the step goes on without it. Nothing can
        stop a thread: what may hang or crash belongs into a process of its own (`rl.envs.sandbox`).
        """
        ...


class Problem(Protocol):
    """One prompt and the means to attempt it. `rl.envs.procedural.TextProblem` is the single-turn one."""

    @property
    def id(self) -> str:
        """Unique within the environment; the same text and answer always have the same id."""
        ...

    @property
    def prompt(self) -> Prompt:
        """What the policy is asked."""
        ...

    def start(self) -> Episode | Awaitable[Episode]:
        """A new attempt, independent of all others. Runs where `Episode.reply` runs."""
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

    def eval_problems(self, count: int) -> Sequence[Problem]:
        """The first `count` held-out problems, always the same."""
        ...
