"""A run's rollouts: which problems each step gets, how they are sampled, and how held-out problems are evaluated."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from controller.runs.checkpoints import DataPosition
from controller.runs.loop_config import HeldOut, RolloutLoopConfig
from controller.runs.models import resolve_model
from controller.runs.recording import RecordedEnv
from generator.config import GeneratorConfig
from rl.envs.jsonl import JsonlProblem
from rl.protocols import Env, Generator, Problem, best_reward_of
from rl.rollouts.episodes import rollout_groups, step_seed
from rl.rollouts.evaluation import Evaluation, eval_sampling, evaluate
from rl.rollouts.guard import time_limit_of, words_of
from rl.rollouts.rendering import Renderer
from rl.system.disk import to_json
from rl.system.hf_config import inspect_model
from rl.types import Datum, Group, SamplingParams


class RolloutSource:
    """Samples training rollouts and evaluates on held-out problems, as a recipe says."""

    def __init__(
        self,
        config: RolloutLoopConfig,
        tell: Callable[[str], None],
        date: datetime | None = None,
        data: DataPosition | None = None,
    ) -> None:
        """`tell` is called with a short message during slow work. A chat template sees `date`, by default now.

        `sample` takes its problems from `data`, which is `Run.data`; without it their place follows from its number.

        Raises ValueError if `config.model` is not a model that can be trained, and for a held-out prompt that leaves no
        room for its completion in the generator's context.
        """
        self.model = resolve_model(config.model, tell)
        """The policy's directory."""
        self.renderer = Renderer(self.model, config.generator.max_model_len, date=date)
        self.sampling = _stopping(config.sampling, config.env)
        main = HeldOut(env=config.env, num_eval=config.num_eval, samples=config.eval_samples)
        self._held_out = {"": main, **config.held_out}
        self._held_out_problems = {name: each.env.eval_problems(each.num_eval) for name, each in self._held_out.items()}
        self.eval_problems = self._held_out_problems[""]
        """The held-out problems, always the same."""
        for name, each in self._held_out.items():
            sampling = each.sampling or self.sampling
            check_prompts_fit(self.renderer, self._held_out_problems[name], config.generator, sampling)
        held_out = (problem for problems in self._held_out_problems.values() for problem in problems)
        if self.renderer.has_chat_template and any(
            isinstance(problem, JsonlProblem) and isinstance(problem.prompt, str) for problem in held_out
        ):
            warnings.warn(
                "prompts of the JSONL file are text, which is sent without the model's chat template; an instruct "
                'model may answer nothing: write [{"role": "user", "content": ...}] in place of the text',
                stacklevel=2,
            )
        self.problems: Mapping[str, Problem] = {}
        """The problems of the groups that were sampled last, by id."""
        self._config = config
        self._time_limit_s = config.env_time_limit_s or time_limit_of(config.env)
        self._recording = config.env if isinstance(config.env, RecordedEnv) else None
        self._data = data

    async def sample_group(self, generator: Generator, number: int, num_samples: int) -> Group:
        """Group `number`, from 0, of the training stream: the same problem and seeds that `sample` gives it."""
        step, index = divmod(number, self._config.prompts_per_step)
        seed = step_seed(self._config.seed, step + 1) + index * num_samples
        (group,) = await self._groups(generator, number, 1, num_samples, seed)
        return replace(group, number=number if group.number is None else group.number)

    async def sample_problems(self, generator: Generator, start: int, count: int, num_samples: int) -> list[Group]:
        """Groups of the problems `start` to `start + count - 1` of the training stream, `num_samples` rollouts each.

        For loops that need a different number of problems at each step, and take `start` from `Run.data`. Seeds follow
        from the run's seed and the problem's number.
        """
        seed = step_seed(self._config.seed, 0) + start * num_samples
        return await self._groups(generator, start, count, num_samples, seed)

    async def sample(self, generator: Generator, number: int, num_samples: int) -> list[Group]:
        """Rollout batch `number`, from 1: `prompts_per_step` groups of `num_samples` rollouts.

        Seeds follow from the run's seed and the number, problems from its seed and the place in the data, so that a run
        can be resumed.
        """
        count, seed = self._config.prompts_per_step, step_seed(self._config.seed, number)
        start = (number - 1) * count if self._data is None else self._data.take(count)
        return await self._groups(generator, start, count, num_samples, seed)

    async def _groups(self, generator: Generator, start: int, count: int, num_samples: int, seed: int) -> list[Group]:
        """Groups of `count` problems, with seeds from `seed` on. A replay takes them from its recording instead."""
        if self._recording is not None:
            step, first = divmod(start, self._config.prompts_per_step)
            if self._data is not None:
                step, first = self._data.step - 1, self._data.taken + start - self._data.next
            return [self.renderer.read_again(group) for group in self._recording.train_groups(step + 1, first, count)]
        problems = self._config.env.train_problems(self._config.seed, start, count)
        self.problems = {problem.id: problem for problem in problems}
        seeded = replace(self.sampling, seed=seed)
        return await rollout_groups(
            generator, self.renderer, problems, seeded, num_samples, time_limit_s=self._time_limit_s
        )

    @property
    def sampled_as(self) -> dict[str, object]:
        """What groups depend on, in JSON types: those that wait in a checkpoint fit no fork with another value."""
        config = self._config
        return to_json({"size": config.group_size, "sampling": config.sampling, "env": config.env, "seed": config.seed})

    def restored(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a `RolloutQueue` from a checkpoint, whose groups have the files of images only, as it was."""
        groups = [self.renderer.read_again(group) for group in values.get("finished_groups", ())]
        return {**values, "finished_groups": groups} if groups else {**values}

    async def evaluate(self, generator: Generator) -> Evaluation:
        """Evaluates on the held-out problems, one set after the other, with `eval_samples` answers to each."""
        done = {name: await self._evaluate(generator, name) for name in self._held_out}
        return replace(done.pop(""), others=done)

    async def _evaluate(self, generator: Generator, name: str) -> Evaluation:
        held_out = self._held_out[name]
        sampling = _stopping(held_out.sampling or self._config.sampling, held_out.env)
        return await evaluate(
            generator,
            self.renderer,
            self._held_out_problems[name],
            *eval_sampling(sampling, held_out.samples),
            time_limit_s=self._config.env_time_limit_s or time_limit_of(held_out.env),
            best_reward=best_reward_of(held_out.env),
        )


def _stopping(sampling: SamplingParams, env: Env) -> SamplingParams:
    """The sampling with the environment's stop strings: either's end an answer."""
    return replace(sampling, stop=tuple(dict.fromkeys((*env.stop, *sampling.stop))))


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
                f"context of {generator.max_model_len} tokens (generator.max_model_len) has room for {max(room, 0)}"
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
