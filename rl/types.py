"""The values that flow through a loop, in the order in which a step produces them.

prompt -> Completion -> Turn -> Rollout -> Group -> Datum -> ForwardBackwardOutput -> OptimStepOutput

Plain, frozen and picklable; arrays are NumPy so that a message carries exactly its own bytes. Legend: T tokens of one
sequence, N tokens of one completion.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length"]
Head = Literal["lm", "value"]
"""What a trainer's model ends in: log-probs of target tokens, or one value per position, which makes it a critic."""
PullMode = Literal["drain", "inflight"]
"""What becomes of running requests when a generator takes new weights: they finish first, or go on under the new."""
WeightTransport = str
"""How pushed weights travel: a row of `rl.weights.transport.TRANSPORTS`, or "auto" for the first that can do it."""
PULL_MODES: tuple[PullMode, ...] = ("drain", "inflight")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the generator samples. Log-probs are always those of the distribution that was sampled from."""

    max_tokens: int
    """Most tokens to sample, at least 1."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Samples from the most probable tokens that together have at least this probability; 1 keeps all."""
    top_k: int = -1
    """Samples from so many of the most probable tokens; -1 keeps the whole vocabulary."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; their tokens stay in it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, besides the model's own end token; the token stays in the completion."""
    seed: int | None = None
    """Sample i of a call uses seed + i. None draws a fresh seed."""
    prompt_logprobs: bool = False
    """Also return log-probs of the prompt's tokens; the prompt is then computed anew, whatever the prefix cache has."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        if self.max_tokens < 1:
            raise ValueError(f"SamplingParams.max_tokens is {self.max_tokens}; it must be at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"SamplingParams.temperature is {self.temperature}; it must be finite and at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"SamplingParams.top_p is {self.top_p}; it must be in (0, 1]")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"SamplingParams.top_k is {self.top_k}; it must be -1 (all) or at least 1")
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"SamplingParams.stop is {self.stop!r}; it must be a tuple of non-empty strings")
        tokens = self.stop_token_ids
        if not isinstance(tokens, tuple) or not all(isinstance(t, int) and t >= 0 for t in tokens):
            raise ValueError(f"SamplingParams.stop_token_ids is {tokens!r}; it must be a tuple of token ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled sequence."""

    tokens: tuple[int, ...]
    """[N] sampled tokens, the stop token included."""
    logprobs: tuple[float, ...]
    """[N] log-prob of each sampled token under the distribution it was sampled from."""
    versions: tuple[int, ...]
    """[N] policy version that produced each token."""
    text: str
    """The tokens decoded, special tokens and stop strings left out."""
    finish_reason: FinishReason
    """"stop": an end token or a stop string; "length": `SamplingParams.max_tokens`."""
    prompt_logprobs: tuple[float, ...] | None = None
    """[P - 1] log-prob at temperature 1 of every prompt token but the first, where asked for."""

    def __post_init__(self) -> None:
        """Raises ValueError unless every token has a log-prob and a version."""
        lengths = (len(self.tokens), len(self.logprobs), len(self.versions))
        if len(set(lengths)) > 1:
            raise ValueError("Completion has {} tokens, {} logprobs and {} versions".format(*lengths))

    @property
    def truncated(self) -> bool:
        """Whether the token limit ended it."""
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the environment said and what the model answered."""

    prompt_tokens: tuple[int, ...]
    """[P] tokens that the model read and did not sample, since its turn before: the message, in its chat template."""
    completion: Completion
    prompt: str = ""
    """The message for a reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One episode with its reward. Single-turn: one prompt and its completion.

    The turns' tokens one after the other are exactly the sequence that the model read and sampled.
    """

    turns: tuple[Turn, ...]
    """At least one, in order."""
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the environment reports beside the reward, averaged over the step by name."""
    out_of_context: bool = False
    """Whether it ended because the context had no room for another turn."""
    environment_s: float = field(default=0.0, compare=False)
    """Seconds spent in the environment."""

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the model sampled, over all turns."""
        return sum(len(turn.completion.tokens) for turn in self.turns)

    @property
    def truncated(self) -> bool:
        """Whether a token limit ended it: that of the last completion or that of the context."""
        return self.out_of_context or self.turns[-1].completion.truncated

    @property
    def text(self) -> str:
        """For a reader: what the model said, and what it was told in between."""
        first, *later = self.turns
        return "\n".join([first.completion.text, *(part for t in later for part in (t.prompt, t.completion.text))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All rollouts of one prompt."""

    problem_id: str
    """Identifies the problem within its environment; held-out and training problems never share one."""
    prompt: str
    """What the model read first, as text."""
    rollouts: tuple[Rollout, ...]
    """Those that have a reward."""
    failures: tuple[str, ...] = ()
    """Of each rollout that the environment failed, what went wrong."""

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[num_rollouts] rewards."""
        return np.array([r.reward for r in self.rollouts], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One training sequence, self-contained: the tokens the model reads and, per position, what its loss needs.

    Arrays are already shifted, as in Tinker: position t reads `tokens[t]` and is scored on `target_tokens[t]`.
    `loss_inputs` always holds `target_tokens` and may hold `weights`: each position's term in the loss is multiplied by
    its weight, and positions of weight 0 are neither scored nor counted. Without `weights` every position counts once.
    """

    tokens: NDArray[np.int64]
    """[T] input tokens, T at least 1."""
    loss_inputs: Mapping[str, NDArray[Any]]
    """Each [T]: target_tokens int64; weights, logprobs, advantages float32; a custom loss may name more."""

    @property
    def weights(self) -> NDArray[np.float32]:
        """[T] the weights, 1 where none were given."""
        given = self.loss_inputs.get("weights")
        return np.ones(len(self.tokens), dtype=np.float32) if given is None else given.astype(np.float32, copy=False)

    @property
    def num_loss_tokens(self) -> int:
        """Positions that the loss scores."""
        return int(np.count_nonzero(self.weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """Everything AdamW needs for one step. The trainer keeps none of it from step to step."""

    learning_rate: float
    beta1: float = 0.9
    """Decay of the running mean of the gradient."""
    beta2: float = 0.95
    """Decay of the running mean of its square."""
    eps: float = 1e-8
    """Added to the root of that mean."""
    weight_decay: float = 0.0
    """Decoupled, as in AdamW (https://arxiv.org/abs/1711.05101)."""
    grad_clip_norm: float = 0.0
    """Global norm above which the gradient is scaled down to it; 0 switches clipping off."""
    learning_rate_multipliers: Mapping[str, float] = field(default_factory=dict[str, float])
    """Pattern of Hugging Face parameter names (fnmatch) -> factor on the learning rate. The first match counts."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        non_negative = ("learning_rate", "weight_decay", "grad_clip_norm")
        for name in non_negative:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"AdamParams.{name} is {value}; it must be finite and at least 0")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"AdamParams.{name} is {value}; it must be in [0, 1)")
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise ValueError(f"AdamParams.eps is {self.eps}; it must be finite and above 0")
        for pattern, factor in self.learning_rate_multipliers.items():
            if not (math.isfinite(factor) and factor >= 0):
                raise ValueError(
                    f"AdamParams.learning_rate_multipliers[{pattern!r}] is {factor}; it must be finite and at least 0"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """What `forward` and `forward_backward` return, for the whole batch, in its order."""

    logprobs: tuple[NDArray[np.float32], ...]
    """One [T] per datum: log-prob of each target token at temperature 1, 0 where its weight is 0. Empty from a value
    head, which has none."""
    entropy: tuple[NDArray[np.float32], ...] | None
    """One [T] per datum when asked for: entropy of the next-token distribution in nats, 0 where the weight is 0."""
    metrics: Mapping[str, float]
    """`loss` (the sum over all tokens), `num_loss_tokens`, and what the loss function reports. Sums over the batch,
    except names that end in `_max` or `_min`."""
    values: tuple[NDArray[np.float32], ...] | None = None
    """One [T] per datum from a value head: the value of having read the tokens up to here, so of the state in which the
    target token is the action; 0 where the weight is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepOutput:
    """What one optimizer step did."""

    policy_version: int
    """Number of optimizer steps applied so far."""
    learning_rate: float
    """The learning rate this step used."""
    grad_norm: float
    """Global norm of the gradient after `grad_scale`, before clipping; not finite when the step was skipped."""
    skipped: bool
    """The gradient held a NaN or an infinity: it was cleared; parameters, optimizer state and version are as before."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """`memory_peak_bytes_VERB_max` for this verb and the trainer's others called since the last step: the most that one
    rank held at a time, in tensors on a GPU, as a process on the CPU."""
