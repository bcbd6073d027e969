"""Checks that a loop makes before it starts any process."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from generator.config import GeneratorConfig
from rl.hf_config import inspect_model
from rl.protocols import Problem
from rl.rollouts.guard import words_of
from rl.rollouts.rendering import Renderer
from rl.types import Datum, SamplingParams


def check_prompts_fit(
    renderer: Renderer, problems: Iterable[Problem], generator: GeneratorConfig, sampling: SamplingParams
) -> None:
    """Raises ValueError for the first prompt that cannot be rendered or leaves no room for its completion."""
    room = generator.max_model_len - sampling.max_tokens
    for problem in problems:
        try:
            length = len(renderer.encode_problem(problem))
        except Exception as error:  # of the environment's prompt, the model's template or its tokenizer
            said = f"{type(error).__name__}: {words_of(error)}" if type(error) is not ValueError else words_of(error)
            name = getattr(problem, "id", None)
            raise ValueError(f"the prompt of problem {name!r} cannot be rendered: {said}") from error
        if length > room:
            raise ValueError(
                f"the prompt of problem {problem.id!r} has {length} tokens; with max_tokens {sampling.max_tokens} the "
                f"generator's context of {generator.max_model_len} tokens (max_model_len) has room for {room}"
            )


def check_texts_fit(max_tokens: int, model: Path, eval_data: Sequence[Datum]) -> None:
    """Raises ValueError if `max_tokens` exceeds the model's context, or is so small that no held-out text is left."""
    context = inspect_model(model).max_context
    if not 1 < max_tokens <= context:
        raise ValueError(
            f"max_tokens is {max_tokens}; it must be between 2 and the model's context of {context} tokens"
        )
    if not eval_data:
        raise ValueError(
            f"max_tokens is {max_tokens}; every held-out text is longer, so there is nothing to measure on"
        )
