"""What a loop checks before it starts any process; shared, so that a loop stays one page."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from generator.config import GeneratorConfig
from rl.advantages import ADVANTAGES
from rl.check_env import require_env
from rl.checks import check_at_least, check_known
from rl.hf_model import inspect_model
from rl.losses import get_loss
from rl.protocols import Env, Problem
from rl.rendering import Renderer
from rl.types import AdamParams, Datum, SamplingParams


class GroupLoopConfig(Protocol):
    """The fields that every group-relative loop has."""

    @property
    def env(self) -> Env: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def prompts_per_step(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def grad_clip_norm(self) -> float: ...
    @property
    def advantage(self) -> str: ...
    @property
    def loss(self) -> str: ...
    @property
    def loss_config(self) -> Mapping[str, float | str]: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def num_heldout(self) -> int: ...
    @property
    def evaluate_every(self) -> int: ...
    @property
    def checkpoint_every(self) -> int: ...
    @property
    def keep_checkpoints(self) -> int: ...


def check_group_loop(config: GroupLoopConfig) -> None:
    """Raises ValueError naming the field, the value and what is accepted."""
    check_at_least(
        1,
        num_steps=config.num_steps,
        prompts_per_step=config.prompts_per_step,
        num_heldout=config.num_heldout,
        evaluate_every=config.evaluate_every,
        keep_checkpoints=config.keep_checkpoints,
    )
    check_at_least(0, warmup_steps=config.warmup_steps, checkpoint_every=config.checkpoint_every)
    require_env(config.env)
    check_at_least(2, group_size=config.group_size)  # advantages are relative to the group
    check_known("advantage", config.advantage, ADVANTAGES)
    check_sampled_distribution(config.sampling)
    get_loss(config.loss, config.loss_config)
    AdamParams(learning_rate=config.learning_rate, grad_clip_norm=config.grad_clip_norm)


def check_sampled_distribution(sampling: SamplingParams) -> None:
    """Raises ValueError for rollouts from another distribution than the one whose log-probs the trainer computes.

    The generator's log-probs are those of what it sampled from; at another temperature, or with a cut-off tail, the
    ratio of trainer to generator would be off from the first step.
    """
    whole: Mapping[str, tuple[float, float]] = {
        "temperature": (sampling.temperature, 1.0),
        "top_p": (sampling.top_p, 1.0),
        "top_k": (sampling.top_k, -1),
    }
    for name, (value, accepted) in whole.items():
        if value != accepted:
            raise ValueError(
                f"sampling.{name} is {value}; training rollouts need {accepted}, the distribution that is trained"
            )


def check_prompts_fit(
    renderer: Renderer, problems: Iterable[Problem], generator: GeneratorConfig, sampling: SamplingParams
) -> None:
    """Raises ValueError for the first prompt that leaves no room for its completion in the generator's context."""
    room = generator.max_model_len - sampling.max_tokens
    for problem in problems:
        length = len(renderer.encode(problem.prompt))
        if length > room:
            raise ValueError(
                f"the prompt of problem {problem.id!r} has {length} tokens; with max_tokens {sampling.max_tokens} the "
                f"generator's context of {generator.max_model_len} tokens (max_model_len) has room for {room}"
            )


def check_texts_fit(max_tokens: int, model: Path, heldout: Sequence[Datum]) -> None:
    """Raises ValueError for texts that the model's context does not hold, and when none is left to measure on."""
    context = inspect_model(model).max_context
    if not 1 < max_tokens <= context:
        raise ValueError(
            f"max_tokens is {max_tokens}; it must be between 2 and the model's context of {context} tokens"
        )
    if not heldout:
        raise ValueError(f"max_tokens is {max_tokens}; every held-out text is longer, so that nothing can be measured")
