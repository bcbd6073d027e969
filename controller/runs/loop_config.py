"""The configuration fields that loops share. Each loop adds its own."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias, cast, get_args

from pydantic import Field, NonNegativeInt, PositiveInt

from controller.launching.hosts import Hosts
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.observers import check_observers
from generator.config import GeneratorConfig, LoRALimits
from rl.advantages import Rewards, get_advantage
from rl.algorithms.metrics import num_completion_tokens
from rl.checks import check_known
from rl.configuration import NotNegative, Positive, Rare, Several, configuration, one_of
from rl.lora import LoRAConfig
from rl.losses import constant_length, get_loss, sequences_alike, token_mean
from rl.protocols import given
from rl.rollouts.episodes import check_sampled_distribution
from rl.rollouts.guard import Environment
from rl.types import MAX_RUN_SEED, AdamParams, Datum, Group, MuonParams, PathOrName, Placement, SamplingParams
from trainer.config import TrainerConfig
from trainer.engine_table import all_engines

Loop: TypeAlias = Callable[[Any, RunFolder, Console], Coroutine[Any, Any, None]]
"""A loop: `train(config, folder, console)` trains a model. The processes it starts end before it does."""
_DEFAULT_ENGINE = "torchtitan"
Evaluated = Literal["between", "beside", "apart"]
ABSENT = "(absent)"
"""Stands for the value of a field that one configuration lacks."""
_OPTIMIZERS = {"adamw": AdamParams, "muon": MuonParams}
NumEval = Annotated[int, Field(ge=1, le=100_000)]
"""Problems of an evaluation. All are made and kept before the first step."""
LossConfig: TypeAlias = Mapping[str, float | str]
"""A loss's options by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """The fields that the configuration of a loop may have, with what holds for one that lacks them."""

    num_steps: int | None = None
    hosts: Hosts | None = None
    lora: LoRAConfig | None = None
    max_restarts: int = 0
    env: Any = None
    data: Any = None
    group_size: int = 1
    tokens_per_step: int = 0
    evaluation: Evaluated = "between"
    generator_config: GeneratorConfig | None = None
    replays: bool = True
    samples_again: bool = False


def _numerics() -> list[str]:
    """The engines that a generator computes with bit by bit."""
    return [name for name, entry in all_engines().items() if entry.numerics]


def options_of(config: object) -> LoopOptions:
    """What a configuration has of these fields."""
    return given(LoopOptions, config)


@configuration
class LoopConfig:
    """Fields that every loop has."""

    model: PathOrName
    """A local Hugging Face directory, `ORG/NAME[@revision]` of the Hugging Face Hub, or "smollm2-135m-instruct"."""
    trainer: TrainerConfig
    """How the model is laid out over processes, and how it computes."""
    lora: LoRAConfig | None = None
    """If given, the loop trains an adapter over the frozen model, and `trainer.compile` is off by default where the
    command line switches it on. None trains the model itself."""
    num_steps: PositiveInt
    """Optimizer steps of the run. A resumed run counts from its beginning."""
    learning_rate: NotNegative
    """The peak of the loop's schedule."""
    lora_learning_rate: Rare[NotNegative | None] = None
    """What `learning_rate` is by default where the command line switches `lora` on: an adapter learns best at about ten
    times the rate of the whole model (https://thinkingmachines.ai/blog/lora/). None: `learning_rate`."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """The kind of step. "muon" is for matrices of hidden layers, with AdamW for all other parameters."""
    warmup_steps: NonNegativeInt = 0
    """First steps, over which the learning rate rises to the peak in a straight line."""
    grad_clip_norm: NotNegative = 1.0
    """Largest norm of a step's normalised gradient; a larger gradient is scaled down to it. 0 switches this off."""
    num_eval: NumEval = 200
    """Held-out problems (examples, pairs) of an evaluation: always the same, and never in the training data."""
    evaluate_every: PositiveInt = 10
    """Steps between evaluations. The first evaluation is before the first step, the last one after the last step."""
    checkpoint_every: NonNegativeInt = 20
    """Steps between checkpoints, with one after the last step; 0 for none: the run then cannot be resumed.
    `benchmarks/checkpoint_cost.py` says what one costs. The trained model is always exported."""
    keep_checkpoints: Rare[PositiveInt] = 2
    """Newest checkpoints that stay on disk. Each holds the parameters and the optimizer state in float32."""
    max_restarts: Rare[NonNegativeInt] = 3
    """How often within `restart_window_minutes` the processes start again and the run continues after its newest
    checkpoint, when a trainer or the weight store dies or hangs; one more failure ends the run. 0: the first one does.
    A generator that dies is replaced in either case."""
    restart_window_minutes: Rare[Positive] = 60.0
    """The time in which `max_restarts` are counted."""
    log: Several[str] = ()
    """Where metrics and samples go in addition to the run's folder: "tensorboard", "wandb", "trackio",
    "opentelemetry". See `plugins/report/README.md`."""
    hosts: Hosts | None = None
    """Other hosts to run on, by role: `--hosts trainer=n1:26600,n2:26600 generator=n3:26600`, or `--hosts ssh ...`,
    `slurm ...`, `kubernetes ...`. None: this host. See `plugins/hosts/README.md`."""
    seed: Annotated[int, Field(ge=0, le=MAX_RUN_SEED)] = 0
    """Seed of the training data's order and of sampling, from 0 to 2,097,151."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        own = vars(type(self))
        if "__dataclass_fields__" in own and "__pydantic_validator__" not in own:
            raise ValueError(
                f"{type(self).__name__} is a plain dataclass; derive it with rl.configuration.configuration"
            )
        check_observers(self.log)
        self.trainer.check_optimizer(self.optim(self.learning_rate))
        if self.lora is None and self.trainer.lora is not None:
            raise ValueError("trainer.lora is set and lora is None; set `lora`, which trainer and generator follow")
        if self.trainer.frozen:
            raise ValueError("trainer.frozen is True; a loop trains this trainer, so it must be False")
        if int((profiled := self.trainer.profile_steps).partition(":")[0] or 0) > self.num_steps:
            raise ValueError(f"trainer.profile_steps is {profiled!r}; the run has {self.num_steps} steps (num_steps)")

    @property
    def policy_config(self) -> TrainerConfig:
        """The policy's trainer as the loop starts it: `trainer`, of an adapter if there is `lora`."""
        return replace(self.trainer, lora=self.lora)

    @property
    def suited_to_an_adapter(self) -> dict[str, object]:
        """The fields that differ by default where the command line switches `lora` on."""
        rate = self.learning_rate if self.lora_learning_rate is None else self.lora_learning_rate
        return {"learning_rate": rate, "trainer": replace(self.trainer, compile=False)}

    def loop(self) -> Loop:
        """The loop that trains with this configuration. Each loop's configuration overrides it.

        Raises ValueError if it was not overridden.
        """
        raise ValueError(f"{type(self).__name__} has no method loop(), which returns the function to train with")

    def optim(self, learning_rate: float) -> AdamParams:
        """The optimizer's parameters for a step with this learning rate."""
        return _OPTIMIZERS[self.optimizer](learning_rate=learning_rate, grad_clip_norm=self.grad_clip_norm)


@configuration
class HeldOut:
    """A further held-out set of a run. It has no part in training."""

    env: Environment
    num_eval: NumEval = 200
    """Problems of an evaluation."""
    samples: PositiveInt = 1
    """Answers to each problem, as `eval_samples`."""
    sampling: SamplingParams | None = None
    """How answers are sampled, or the training's `sampling`. A single answer is greedy."""


@configuration
class RolloutLoopConfig(LoopConfig):
    """Fields of a loop that learns from rollouts."""

    env: Environment
    """The source of problems and rewards."""
    generator: GeneratorConfig
    """How the generator's model is laid out over processes, and in which dtype."""
    sampling: SamplingParams
    """How training rollouts are sampled. Its stop strings end an answer in addition to the environment's."""
    routes: Rare[Literal["replay", "off"]] = "off"
    """Whether a mixture is trained with the experts that the generator's layers chose (https://arxiv.org/abs/2510.11370).
    It costs a byte per token, layer and expert. `ownloop parity` measures its effect on a model."""
    prompts_per_step: PositiveInt
    """Problems that a step samples rollouts for."""
    group_size: PositiveInt
    """Rollouts of each problem."""
    eval_samples: PositiveInt = 1
    """Answers to each held-out problem: 1 is a greedy one; several are sampled and also give pass@k."""
    held_out: Mapping[str, HeldOut] = field(default_factory=dict[str, HeldOut])
    """Further held-out sets by name, which every evaluation measures: "aime" gives the metric `eval_aime_reward`."""
    numerics: Annotated[str, one_of(lambda: ("", *_numerics()), "engines")] = ""
    """"bitwise": trainer and generator compute by the same kernels, so that their log-probs are equal bit by bit, on
    CPUs. See `plugins/bitwise/README.md`. Empty: each computes with the fastest kernels that it has."""
    placement: Placement = "split"
    """Which GPUs trainers and generator use: "split" gives each its own; "colocated" gives all of them the first ones,
    and they take turns: see `docs/memory.md`. A loop that trains and samples at the same time gains nothing by it."""
    evaluation: Evaluated = "between"
    """When held-out problems are sampled: "between" two steps; "beside" the trainer's work in a step, while the
    generator has nothing else to do; or "apart", by a generator of its own, while training continues, however many
    steps that takes. All measure the same weights, and training is the same to the last digit."""
    records_routes = True
    """Whether the loop's data have the routes of its completions."""
    evaluations = get_args(Evaluated)
    """What `evaluation` may be: not "beside" where the generator has other work then."""
    samples_again = False
    """Whether a step may sample more than `prompts_per_step` problems."""
    replays = True
    """Whether the loop can train on recorded rollouts in place of new ones."""
    env_time_limit_s: Rare[Positive | None] = None
    """Longest that one call of the environment may take; a longer one costs its rollout. None: what the environment
    says (`call_time_limit_s`), and 60 s if it says nothing."""

    def __post_init__(self) -> None:
        """Raises ValueError as the base does."""
        LoopConfig.__post_init__(self)  # super() does not know a class with slots
        if self.evaluation not in self.evaluations:
            raise ValueError(f"evaluation is {self.evaluation!r}; in this loop it must be one of {self.evaluations}")
        if self.evaluation != "between" and self.placement == "colocated":
            raise ValueError(
                f"evaluation is {self.evaluation!r} and placement 'colocated', so that the trainer has all GPUs then; "
                "use evaluation 'between'"
            )
        if self.numerics and self.trainer.engine not in (_DEFAULT_ENGINE, self.numerics):
            raise ValueError(
                f"trainer.engine is {self.trainer.engine!r} and numerics is {self.numerics!r}, which has its own; "
                "leave one of the two out"
            )
        for name in self.held_out:
            if not name.isidentifier():
                raise ValueError(f"held_out has {name!r}; a name must have letters, digits and underscores alone")
        check_sampled_distribution(self.sampling)
        check_known("routes", self.routes, ("replay", "off") if self.records_routes else ("off",))
        if self.routes == "replay":
            self.trainer.check_routes()
        self.generator_config  # noqa: B018 - its own checks

    @property
    def policy_config(self) -> TrainerConfig:
        """The policy's trainer as the loop starts it: `trainer`, of an adapter if there is `lora`, and placed."""
        return replace(self.placed(self.trainer), lora=self.lora)

    def placed(self, config: TrainerConfig) -> TrainerConfig:
        """A trainer as the loop starts it: a critic's, a teacher's, or the policy's without its adapter."""
        return replace(config, placement=self.placement, engine=self.numerics or config.engine)

    @property
    def generator_config(self) -> GeneratorConfig:
        """The generator as the loop starts it: `generator` with what evaluations, sampling, routes and `lora` need."""
        samplings = (self.sampling, *(held_out.sampling for held_out in self.held_out.values()))
        cuts = any(sampling is not None and sampling.cuts for sampling in samplings)
        config = replace(
            self.generator,
            placement=self.placement,
            numerics=self.numerics,
            evaluator=self.evaluation == "apart",
            kept_sets=self.generator.kept_sets or cuts,
            routes=self.routes == "replay",
        )
        if self.lora is None:
            return config
        room = config.lora or LoRALimits(max_rank=self.lora.rank)
        vision = room.vision or self.trainer.train_vision
        return replace(config, lora=replace(room, max_rank=max(room.max_rank, self.lora.rank), vision=vision))


@configuration
class GroupLoopConfig(RolloutLoopConfig):
    """Fields of a loop that compares the rollouts of one prompt."""

    group_size: Annotated[int, Field(ge=2)]
    """Rollouts of each problem, at least 2."""
    advantage: str = "group_mean_std"
    """How a group's rewards become advantages: a name of `ownloop list --advantages`, or a "module:function"."""
    loss: str = "importance_sampling"
    """A name that `ownloop list --losses` shows, or a function as "module:function"."""
    loss_config: LossConfig = field(default_factory=dict[str, float | str])
    """The loss's options, and the options that all policy losses share (`rl.losses.shared`), by name."""
    normaliser: Literal["paper", "tokens", "sequences", "constant"] = "paper"
    """What the loss's sum is divided by: as its paper does, or so that tokens or sequences weigh alike, or that the
    length of a completion plays no part: the number of sequences x `sampling.max_tokens`."""
    loss_inputs = ("logprobs", "advantages")
    """What the loop's datums hold for the loss. A loop that adds others, such as `old_logprobs`, names them too."""

    def __post_init__(self) -> None:
        """Raises ValueError as the base does."""
        RolloutLoopConfig.__post_init__(self)
        get_advantage(self.advantage)
        get_loss(self.loss, self.loss_config).check_inputs(self.loss_inputs)

    def normalised(
        self, batch: Sequence[Datum], groups: Sequence[Group] = (), length: float | None = None
    ) -> tuple[Sequence[Datum], float]:
        """The batch to compute gradients of, and the `grad_scale`.

        Tokens and sequences are counted in `groups`, or else in the batch. Where sequences weigh alike, each counts as
        one of `length` tokens, by default the batch's mean; batches of one step need the same.
        """
        kind = get_loss(self.loss, self.loss_config).normaliser if self.normaliser == "paper" else self.normaliser
        num_sequences = sum(len(group.rollouts) for group in groups) or len(batch)
        if kind == "constant":
            return batch, constant_length(num_sequences, self.sampling.max_tokens)
        if kind == "tokens":
            return batch, 1 / num_completion_tokens(groups) if groups else token_mean(batch)
        length = length or 1 / (token_mean(batch) * len(batch))
        return sequences_alike(batch, length), 1 / (num_sequences * length)

    @property
    def advantage_function(self) -> Callable[..., Rewards]:
        """The function that `advantage` names: [G] rewards of one group -> [G] advantages."""
        return get_advantage(self.advantage)


def differences(before: object, after: object, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted field -> the two values, for all fields in which two configurations (in JSON types) differ."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        old, new = cast("Mapping[str, object]", before), cast("Mapping[str, object]", after)
        found: dict[str, tuple[Any, Any]] = {}
        for key in [*old, *(key for key in new if key not in old)]:
            found |= differences(old.get(key, ABSENT), new.get(key, ABSENT), f"{prefix}.{key}" if prefix else key)
        return found
    return {} if before == after else {prefix: (before, after)}
