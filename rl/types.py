"""The values that flow through a loop, in the order in which a step produces them.

prompt -> Completion -> Answer -> Turn -> Rollout -> Group -> Datum -> ForwardBackwardOutput -> OptimStepOutput

All are frozen and picklable. Arrays are NumPy, because a pickled view of a torch tensor carries the whole storage.
Legend: T tokens of one sequence, N tokens of one completion, P tokens of one prompt.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, PositiveInt

from rl.checks import MIN_FLOAT32
from rl.configuration import NotNegative, Positive, configuration
from rl.images import PlacedImage
from rl.sampling import Ids, KeptSets, Routes, SamplingParams

FinishReason = Literal["stop", "length"]
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Of a running mean."""
Head = Literal["lm", "value"]
"""The output of a trainer's model: log-probs of the target tokens, or one value per position, as a critic needs."""
HeadDtype = Literal["float32"]
"""The dtype in which a trainer's and a generator's logits are computed, if it is not that of the rest."""
PullMode = Literal["drain", "inflight"]
"""Whether running requests finish before a generator takes new weights, or continue under the new weights."""
Placement = Literal["split", "colocated"]
"""Whether trainer and generator have GPUs of their own, or take turns on the same ones."""
PathOrName = Annotated[str, "path or name"]
"""A file or folder here, or what is known by a name, such as a model of the hub. A resumed run checks what is here."""
WeightTransport = str
"""How pushed weights travel: a name in `rl.weights.version.transports()`, or "auto" for the first that can do it."""
PULL_MODES: tuple[PullMode, ...] = ("drain", "inflight")
MAX_RUN_SEED = (1 << 21) - 1
"""The largest seed of a run. Seeds of its samples, which `rl.rollouts.episodes.step_seed` gives, are below 2^61."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled sequence."""

    tokens: tuple[int, ...]
    """[N] sampled tokens, including the stop token."""
    logprobs: tuple[float, ...]
    """[N] log-prob of each sampled token under the distribution that it was sampled from. Greedy completions have those
    at temperature 1."""
    versions: tuple[int, ...]
    """[N] policy version that sampled each token."""
    text: str
    """The decoded tokens, without stop strings, and without special tokens that begin, end or border a turn."""
    finish_reason: FinishReason
    """"stop": an end token or a stop string; "length": `SamplingParams.max_tokens`."""
    temperature: float = 1.0
    """0 if the tokens were sampled greedily."""
    kept: KeptSets | None = None
    """N sets: the tokens that a cut (top-k, top-p, min-p) left for each token. None if nothing was cut."""
    routes: Routes | None = None
    """The experts that were chosen, of a mixture whose generator returns them (`GeneratorConfig.routes`)."""
    prompt_logprobs: tuple[float, ...] | None = None
    """[P - 1] log-prob at temperature 1 of every prompt token but the first, if asked for."""
    topk_prompt_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    """`[P - 1][K]`: the most probable tokens at these positions with their log-probs, falling, if asked for."""

    def __post_init__(self) -> None:
        """Raises ValueError unless every token has a log-prob and a version."""
        lengths = (len(self.tokens), len(self.logprobs), len(self.versions))
        if len(set(lengths)) > 1:
            raise ValueError("Completion has {} tokens, {} logprobs and {} versions".format(*lengths))

    @property
    def truncated(self) -> bool:
        """Whether the token limit ended the completion."""
        return self.finish_reason == "length"


REASONING: Mapping[str, str] = {
    "<think>": "</think>",  # Qwen3, DeepSeek-R1, SmolLM3
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",  # EXAONE Deep
    "<reasoning>": "</reasoning>",
    "[THINK]": "[/THINK]",  # Magistral
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "<mm:think>": "</mm:think>",  # MiniMax-M3
    "<|START_THINKING|>": "<|END_THINKING|>",  # Command A
    "<|begin_of_thought|>": "<|end_of_thought|>",  # OpenThinker
    "<|inner_prefix|>": "<|inner_suffix|>",  # Apertus
    "<|channel>": "<channel|>",  # Gemma 4
    "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",  # gpt-oss
}
"""What opens reasoning -> what closes it. Reasoning in any other spelling is content."""
DELIMITERS = re.compile("|".join(map(re.escape, [*REASONING, *REASONING.values()])))


class Answer(str):
    """What the model said in one turn: the whole text, which knows its reasoning, its content, and whether it ends.

    An environment that wants the text alone uses it as the `str` that it is. Reasoning begins and ends with a pair of
    `REASONING`. A second opening within reasoning is part of it. A closing delimiter without an opening ends reasoning
    that began with the text. Reasoning that nothing closes leaves no content. An answer is immutable.
    """

    __slots__ = ("content", "is_cut_off", "reasoning")
    reasoning: str
    """What the model reasoned, without the delimiters."""
    content: str
    """The answer: everything but the reasoning."""
    is_cut_off: bool
    """Whether a token limit ended the text."""

    def __new__(cls, text: str, reasoning: str = "", content: str = "", is_cut_off: bool = False) -> Self:
        """An answer of known parts; `read` finds them."""
        self = super().__new__(cls, text)
        for name, value in (("reasoning", reasoning), ("content", content), ("is_cut_off", is_cut_off)):
            object.__setattr__(self, name, value)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        """Raises AttributeError."""
        raise AttributeError(f"{name} of an Answer cannot be set")

    def __delattr__(self, name: str) -> None:
        """Raises AttributeError."""
        raise AttributeError(f"{name} of an Answer cannot be deleted")

    @classmethod
    def read(cls, text: str, *, opening: str = "", is_cut_off: bool = False) -> "Answer":
        """The parts of a text; of an `Answer`, the parts that it has.

        `opening` is the delimiter of `REASONING` that the prompt leaves open, if there is one: the text then begins
        inside reasoning.
        """
        if isinstance(text, Answer):
            return text
        reasoning, content, _ = _parts(text, opening)
        return cls(str(text), reasoning, content, is_cut_off)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the parts."""
        return Answer, (str(self), self.reasoning, self.content, self.is_cut_off)


def open_reasoning(text: str) -> str:
    """The delimiter of `REASONING` that a text leaves open; empty if there is none."""
    return _parts(text, "")[2]


def _parts(text: str, opening: str) -> tuple[str, str, str]:
    """A text's reasoning, its content, and the delimiter that it leaves open. `opening` was open before the text."""
    reasoning, content = list[str](), list[str]()
    start = 0
    for found in DELIMITERS.finditer(text):
        before, delimiter = text[start : found.start()], found[0]
        if opening and delimiter != REASONING[opening]:
            continue  # another delimiter within the reasoning
        if not opening and delimiter not in REASONING:  # the opening is missing
            reasoning += [*content, before]
            content = []
        else:
            (reasoning if opening else content).append(before)
        opening, start = delimiter if delimiter in REASONING else "", found.end()
    (reasoning if opening else content).append(text[start:])
    return "".join(reasoning), "".join(content), opening


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of the environment and the model's answer."""

    prompt_tokens: tuple[int, ...]
    """[P] tokens between the previous answer and this one: the message in its chat template. They know its images."""
    completion: Completion
    prompt: str = ""
    """The message as text, for a human reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One episode with its reward. A single-turn rollout is one prompt and its completion.

    The tokens of all turns, concatenated, are exactly the sequence that the model read and sampled.
    """

    turns: tuple[Turn, ...]
    """At least one, in order."""
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further numbers from the environment. The loop averages them over a step, by name."""
    out_of_context: bool = False
    """Whether the episode ended because the context had no room for another turn."""
    environment_s: float = field(default=0.0, compare=False)
    """Seconds spent in the environment."""
    sampling: SamplingParams | None = field(default=None, compare=False)
    """How it was sampled; None if that is not known, as in a recording."""

    @property
    def num_sampled_tokens(self) -> int:
        """The number of tokens that the model sampled in all turns."""
        return sum(len(turn.completion.tokens) for turn in self.turns)

    @property
    def truncated(self) -> bool:
        """Whether a token limit ended the episode: that of its last completion, or that of the context."""
        return self.out_of_context or self.turns[-1].completion.truncated

    @property
    def text(self) -> str:
        """The model's answers and the messages between them, as text for a human reader."""
        first, *later = self.turns
        return "\n".join([first.completion.text, *(part for t in later for part in (t.prompt, t.completion.text))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All rollouts of one prompt."""

    problem_id: str
    """Identifies the problem within its environment. Held-out and training problems never share an id."""
    prompt: str
    """The problem's prompt as text."""
    rollouts: tuple[Rollout, ...]
    """The rollouts that have a reward."""
    failures: tuple[str, ...] = ()
    """One message for each rollout that failed in the environment, with a line for each frame of its code."""
    number: int | None = field(default=None, compare=False)
    """Its place in the training stream, from 0, where steps may take groups in another order."""

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[num_rollouts] rewards."""
        return np.array([r.reward for r in self.rollouts], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One self-contained training sequence: the tokens that the model reads, and the arrays that its loss needs.

    Arrays are already shifted, as in Tinker: position t reads `tokens[t]` and is scored on `target_tokens[t]`.
    `loss_inputs` always holds `target_tokens`, and may hold `weights` and `reported_mask`. The loss multiplies each
    position's term by its weight; without `weights`, every weight is 1. A position of weight 0 is neither scored nor
    counted. Where `reported_mask` is true it is scored, so that its log-prob and entropy are returned, and still not
    counted: it changes no loss, mean or metric. A position of another weight is scored and counted, masked or not.
    """

    tokens: NDArray[np.int64]
    """[T] input tokens, T at least 1."""
    loss_inputs: Mapping[str, np.ndarray]
    """[T] each: target_tokens int64; weights, logprobs, advantages float32; reported_mask bool; and any others that a
    custom loss uses."""
    temperature: float = 1.0
    """By which logits are divided: the sampler's, so that policy, references and teachers score a token under the
    distribution that it was sampled from."""
    kept: KeptSets | None = None
    """T sets: the tokens that a cut left for each target, which is scored among them. None if nothing was cut."""
    routes: Ids | None = None
    """[T, layers, k] uint8 or uint16: the experts that the generator's layers chose for each token. The policy replays
    them; references, teachers and critics, which are other models, do not. None: layers choose for themselves."""
    images: tuple[PlacedImage, ...] = ()
    """The images that some of the tokens stand for, in order."""

    @property
    def weights(self) -> NDArray[np.float32]:
        """[T] the weights, all 1 if `loss_inputs` has none."""
        given = self.loss_inputs.get("weights")
        return np.ones(len(self.tokens), dtype=np.float32) if given is None else given.astype(np.float32, copy=False)

    @property
    def counted(self) -> NDArray[np.bool_]:
        """[T] whether a position's term counts: its weight is not 0."""
        return self.weights != 0

    @property
    def scored(self) -> NDArray[np.bool_]:
        """[T] whether a position has a log-prob: it counts, or is only reported."""
        return self.counted | self.loss_inputs.get("reported_mask", np.False_)

    @property
    def num_loss_tokens(self) -> int:
        """The number of positions whose term counts."""
        return int(np.count_nonzero(self.counted))

    def weighted(self, factor: float) -> "Datum":
        """The datum with its weights multiplied by a factor."""
        return replace(self, loss_inputs={**self.loss_inputs, "weights": self.weights * np.float32(factor)})


def _check_eps(value: float) -> float:
    if value < MIN_FLOAT32:
        raise ValueError("Input should be above 0 in float32")
    return value


@configuration
class AdamParams:
    """All hyper-parameters of one AdamW step. The trainer keeps none of them from step to step."""

    learning_rate: NotNegative
    beta1: Decay = 0.9
    """Decay of the running mean of the gradient."""
    beta2: Decay = 0.95
    """Decay of the running mean of the squared gradient."""
    eps: Annotated[Positive, AfterValidator(_check_eps)] = 1e-8
    """Added to the square root of that mean. A smaller one would be rounded to 0, by which 0 is then divided."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay (https://arxiv.org/abs/1711.05101)."""
    grad_clip_norm: NotNegative = 0.0
    """A gradient with a larger global norm is scaled down to this norm; 0 switches clipping off."""
    learning_rate_multipliers: Mapping[str, NotNegative] = field(default_factory=dict[str, float])
    """Pattern of Hugging Face parameter names (fnmatch) -> factor of the learning rate. The first match counts. A
    pattern that matches no parameter is refused."""


@configuration
class MuonParams(AdamParams):
    """All hyper-parameters of one Muon step: matrices of hidden layers are updated by orthogonal matrices.

    All other parameters (embeddings, the head, vectors) take an AdamW step with the fields of `AdamParams`. A run may
    change between the two: Muon goes on with AdamW's mean of the gradient, and AdamW starts anew after a step of Muon,
    which has no second moment. An update has the size of AdamW's (0.2 sqrt(larger side)), so learning rates carry over:
    https://arxiv.org/abs/2502.16982. Muon: https://kellerjordan.github.io/posts/muon.
    """

    beta1: Decay = 0.95
    nesterov: bool = True
    """Whether a step uses the gradient once more, in addition to the mean."""
    num_iterations: PositiveInt = 5
    """Newton-Schulz iterations, each of which brings the singular values nearer to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """The result of `forward` or `forward_backward` for the whole batch, in its order."""

    logprobs: tuple[NDArray[np.float32], ...]
    """One [T] per datum: log-prob of each target token at the datum's temperature among its kept tokens, 0 where the
    weight is 0. Empty for a value head."""
    entropy: tuple[NDArray[np.float32], ...] | None
    """One [T] per datum if asked for: entropy of the same distribution in nats, and 0 where the weight is 0."""
    metrics: Mapping[str, float]
    """`loss` (the sum over all tokens, 0 if none counts), `num_loss_tokens`, and the metrics of the loss function.
    All are sums over the batch, except names that end in `_max` or `_min`. `forward` has no loss."""
    values: tuple[NDArray[np.float32], ...] | None = None
    """One [T] per datum from a value head, and 0 where the weight is 0. The value at position t is that of the state
    after tokens 0 to t, in which the target token is the action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepOutput:
    """The result of one optimizer step."""

    policy_version: int
    """The number of optimizer steps applied so far."""
    learning_rate: float
    """The learning rate of this step."""
    grad_norm: float
    """Global norm of the gradient after `grad_scale` and before clipping. Not finite if the step was skipped."""
    skipped: bool
    """Whether the gradient held a NaN, an infinity or, once clipped, numbers too large for moments in float32. It was
    then cleared, and nothing else changed."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """`memory_peak_bytes_VERB_max` for `optim_step` and every verb called since the previous step: the peak memory of
    the rank that used most. On a GPU this counts tensors, on the CPU the whole process. `push_bytes_per_s` of the last
    push, if there was one: bytes of the published tensors, in the generator's dtype, over the seconds of the call."""
