"""All that a controller script sees: `Trainer`, `Generator` and `Env`. Any object with these methods can stand in.

Every method raises `ValueError` for a mistake of the caller, naming the field, its value and what is accepted; all
state is then as it was before the call. If a process died, it raises `controller.processes.errors.MeshError`.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from rl.lora import LivePolicy, LoRAConfig, Policy
from rl.types import AdamParams, Completion, Datum, ForwardBackwardOutput, OptimStepOutput, PullMode, SamplingParams

T = TypeVar("T")
Prompt = str | Sequence[Mapping[str, Any]]
"""Text that the model continues as it stands, or a chat: messages with `role` and `content`, which the model's chat
template turns into text. If the last message has the role "assistant", the model continues that message.

For a model that reads images, the content may be a list of parts: {"type": "text", "text": ...} and {"type": "image",
"image": ...}, an image being bytes of a file, a path or an image of Pillow."""


class Trainer(Protocol):
    """Owns parameters, gradients and optimizer state. Executes calls in the order in which they were issued."""

    async def policy_version(self) -> int:
        """The number of optimizer steps applied so far."""
        ...

    async def forward_backward(
        self, batch: Sequence[Datum], loss: str | Callable[..., Any], loss_config: Mapping[str, object] | None = None
    ) -> ForwardBackwardOutput:
        """Adds the gradient of the loss, summed over all tokens of the batch, to the accumulated gradient."""
        ...

    async def forward(self, batch: Sequence[Datum], *, entropy: bool = False) -> ForwardBackwardOutput:
        """Computes log-probs of the batch's target tokens, and entropies if asked to. Leaves no gradient."""
        ...

    async def optim_step(self, params: AdamParams, grad_scale: float = 1.0) -> OptimStepOutput:
        """Multiplies the accumulated gradient by `grad_scale`, clips it, steps the optimizer, clears the gradient."""
        ...

    async def zero_grad(self) -> None:
        """Drops the accumulated gradient."""
        ...

    async def to(self, device: str, *, model: bool = False, gradients: bool = False, optimizer: bool = False) -> None:
        """Offloads parameters, gradients or optimizer state to `device` ("cpu"), or moves them back ("cuda").

        Offloaded state is moved to the accelerator for each call that needs it, and back afterwards. A trainer that
        computes on the CPU moves nothing.
        """
        ...

    async def push_model_state_dict(self) -> int:
        """Publishes the current weights in the generator's dtype and returns their policy version."""
        ...

    async def save_checkpoint(self, path: Path, *, asynchronous: bool = False, keep_last: int | None = None) -> None:
        """Writes model, optimizer, random state and version. `path` appears only when everything is on disk.

        If `asynchronous`, returns as soon as the state is copied; `wait_for_checkpoint` waits until it is written. With
        `keep_last`, deletes all but that many checkpoints in its directory: this and the highest versions.
        """
        ...

    async def wait_for_checkpoint(self) -> None:
        """Returns once no checkpoint is being written. Raises the error of the last asynchronous save, if it failed."""
        ...

    async def load_checkpoint(self, path: Path, *, weights_only: bool = False) -> int:
        """Restores a checkpoint, drops any accumulated gradient and returns the policy version.

        With `weights_only`, restores the parameters alone: the optimizer is reset and the version is 0.
        """
        ...

    async def export_hf(self, path: Path) -> None:
        """Writes a model directory that transformers and vLLM can load.

        An adapter is merged into the base there; its own directory, as of `export_peft`, is `adapter` within `path`.
        """
        ...

    async def adapter(self, name: str, config: LoRAConfig) -> "Trainer":
        """Makes a LoRA adapter over this trainer's frozen base, and returns it as a trainer of its own.

        An adapter has its own gradient, optimizer state, version and checkpoints. Calls of several adapters and of the
        base may be in flight together; they are executed in the order in which they were issued. A call that fails
        leaves all other adapters as they were. An adapter's `adapter` makes another one over the same base.
        """
        ...

    async def drop(self) -> None:
        """Frees an adapter: parameters, gradient, optimizer state and published weights. Later calls are refused.

        Calls that were issued before are executed first. The base cannot be dropped.
        """
        ...

    async def export_peft(self, path: Path) -> None:
        """Writes an adapter as a directory that `peft` and vLLM can load, in float32."""
        ...


class Generator(Protocol):
    """Samples tokens from the model itself, and from adapters of it that it has pulled, each under its own version."""

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1, *, policy: Policy = None
    ) -> list[Completion]:
        """Samples `num_samples` completions of one prompt. Calls in flight together are batched continuously.

        `policy` is what to sample from: None for the model itself, an adapter's name for its newest pulled version, or
        `(name, version)` for a frozen version of it. Requests of all policies run in the same batches.
        """
        ...

    async def pull_model_state_dict(
        self,
        version: int,
        *,
        policy: LivePolicy = None,
        frozen: bool = False,
        mode: PullMode = "drain",
        keep_prefix_cache: bool = False,
    ) -> None:
        """Loads exactly this policy version. `Completion.versions` records which version sampled each token.

        `policy` is the adapter whose version it is, or None for the model itself. Adapters are known from their first
        pull on. A pull of an adapter concerns only that adapter's requests. A pull of the model itself concerns all
        requests. With `frozen`, the version is kept as `(policy, version)` beside the adapter's newest one and never
        changes afterwards.

        With "drain", running requests finish under the weights they began with, and new requests wait until the pull
        is done. With "inflight", running requests continue under the new weights from their next token on; the keys
        and values of their earlier tokens are recomputed, so that log-probs belong to the new weights.
        `keep_prefix_cache` skips this, also for new prompts that share a prefix with older ones: that is faster, but
        log-probs then mix keys and values of several versions.
        """
        ...

    async def drop_policy(self, policy: Policy) -> None:
        """Forgets an adapter's newest version (a name) or a frozen one (`(name, version)`).

        Requests that are running finish first; later ones raise ValueError, until the policy is pulled again.
        """
        ...


class Schedule(Protocol):
    """The order of events of a run that ran ahead, for a loop that repeats it."""

    order: Mapping[int, Sequence[int]]
    """Step -> the numbers of the groups that it takes."""

    def repeated_by(self, generator: Generator) -> Generator:
        """A generator that samples every token under the version that sampled it in the recorded run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """An environment's reply that asks the model for another turn."""

    messages: Prompt
    """What the model reads next: text if the problem's prompt is text, otherwise the new messages of the chat."""
    reward: float = 0.0
    """The episode's reward if it has to end here, because the context has no room for another turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """An environment's reply that ends the episode."""

    reward: float
    """The episode's reward. It must be finite."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further numbers to report. The loop averages them over a step, by name."""


Reply = Observation | Done


class Episode(Protocol):
    """One attempt at a problem."""

    def reply(self, completion: str) -> Reply | Awaitable[Reply]:
        """Answers the model's completion with another observation or with the final reward.

        `completion` is the text as a `rl.types.Answer`, which also knows its reasoning, its content, and whether it was
        cut off. `rl.types.Answer.read` makes one of a plain text.
        A plain function runs in a thread, beside functions of other episodes, so it may compute or block. An
        `async def` runs on the event loop and must not block it. A call that raises, takes longer than its limit
        (see `Env`), or returns a reward that is not finite costs this rollout; the failure is reported and the step
        continues.
        A thread cannot be stopped: code that may hang or crash belongs in a process of its own (`ownloop_sandbox`).
        """
        ...


class Problem(Protocol):
    """A prompt, and episodes that attempt it. `rl.envs.procedural.TextProblem` is the single-turn implementation.

    A problem may have more attributes: `ProblemOptions`.
    """

    @property
    def id(self) -> str:
        """Unique within the environment. The same text and answer always have the same id."""
        ...

    @property
    def prompt(self) -> Prompt:
        """What the model reads first."""
        ...

    def start(self) -> Episode | Awaitable[Episode]:
        """Starts a new attempt, independent of all others. Runs in a thread or on the event loop, like `reply`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemOptions:
    """The attributes that a `Problem` may have, with what holds for one that lacks them."""

    tools: Sequence[Mapping[str, object]] = ()
    """JSON schemas of functions, which the model's chat template shows it together with the prompt."""
    answer: str | None = None
    """A right completion; None if none is known."""
    wrong_answers: Sequence[str] = ()
    """Plausible wrong completions."""
    answer_of: Callable[[str], str] = str.strip
    """The end of an answer, such as the number in its box: evaluations count how often each was given."""
    best_reward: float | None = None
    """The highest reward of an episode. None: the environment's."""


class Env(Protocol):
    """A source of problems. Its training and held-out splits never overlap.

    An environment may have more attributes: `EnvOptions`.
    """

    @property
    def name(self) -> str:
        """The environment's name in messages."""
        ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer, in addition to the model's own end token."""
        ...

    def train_problems(self, seed: int, start: int, count: int) -> Sequence[Problem]:
        """Problems number `start` to `start + count - 1` of the endless training stream that `seed` selects."""
        ...

    def eval_problems(self, count: int) -> Sequence[Problem]:
        """The first `count` held-out problems. They are the same in every run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvOptions:
    """The attributes that an `Env` may have, with what holds for one that lacks them."""

    call_time_limit_s: float = 60.0
    """The longest that one call of `start` or `reply` may take. A recipe's `env_time_limit_s` replaces it."""
    best_reward: float = 1.0
    """The highest reward of an episode: a policy that gets it for every problem has nothing left to learn."""


def given(kind: type[T], owner: object) -> T:
    """The dataclass `kind` with those of its fields that `owner` has as attributes; others have their defaults."""
    names = [each.name for each in fields(cast("Any", kind)) if hasattr(owner, each.name)]
    return kind(**{name: getattr(owner, name) for name in names})


def best_reward_of(env: object) -> float:
    """The highest reward of an episode of this environment: its `best_reward`, or else 1.0."""
    return given(EnvOptions, env).best_reward
