"""Repeats a run that ran ahead, in the order of its events, and compares every token with the recorded one.

A run's recorded rollouts say which version sampled each token, and which groups each step took. What a token is follows
from the tokens before it, the seed, the position and the version alone. So a completion across several versions is
sampled in parts, each by a request of its own while the generator has that part's version, and a pull waits until all
that the version before it had sampled is there.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from controller.commands.resume import CHANGEABLE
from controller.commands.saved_recipe import PARENT_FILE
from controller.processes.errors import TrainingStoppedError
from controller.runs.folder import CONFIG_FILE, ROLLOUTS, is_finished, read_json
from controller.runs.loop_config import ABSENT, differences
from controller.runs.recording import RecordedSteps
from rl.images import join_tokens
from rl.lora import LivePolicy, Policy
from rl.protocols import Generator
from rl.rollouts.episodes import all_results, step_seed, turn_seed
from rl.system.disk import to_json
from rl.types import Completion, Group, PullMode, SamplingParams

_FREE = {*CHANGEABLE, "schedule", "generator.num_replicas", "generator.max_num_seqs"} - {"num_steps"}
"""Fields in which a repetition may differ from its run."""
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Planned:
    """A completion of the recorded run."""

    name: str
    """Step, problem, rollout and turn."""
    prompt: tuple[int, ...]
    completion: Completion


class RunSchedule:
    """Satisfies `rl.protocols.Schedule`: the order of events of `config.schedule`."""

    def __init__(self, config: Any) -> None:
        """Raises ValueError for a folder that holds no finished run of this configuration, and for one with failures.

        A rollout that failed is not recorded, and neither is which version sampled it.
        """
        run: Path = config.schedule
        _check_same(run, config)
        recorded = RecordedSteps(run / ROLLOUTS)
        order: dict[int, Sequence[int]] = {}
        self._planned: dict[int, Planned] = {}
        for step in sorted(recorded):
            groups = recorded[step]
            if len(groups) < config.prompts_per_step or any(group.failures for group in groups):
                raise ValueError(f"schedule is {run}, where rollouts of step {step} failed, which cannot be repeated")
            numbers = [group.number for group in groups if group.number is not None]
            if len(numbers) < len(groups):
                raise ValueError(f"schedule is {run}, whose rollouts have no numbers; it must be a run of grpo_async")
            order[step] = numbers
            for number, group in zip(numbers, groups, strict=True):
                place, index = divmod(number, config.prompts_per_step)
                seed = step_seed(config.seed, place + 1) + index * config.group_size
                self._planned |= _planned(step, seed, group)
        self.order: Mapping[int, Sequence[int]] = order
        """See `rl.protocols.Schedule`."""
        self._patience_s = max(_PATIENCE_S, 2 * (config.env_time_limit_s or 0))

    def repeated_by(self, generator: Generator) -> Generator:
        """See `rl.protocols.Schedule`."""
        return ScheduledGenerator(generator, self._planned, self._patience_s)


def _check_same(run: Path, config: object) -> None:
    """Raises ValueError unless this is a whole run of the same configuration."""
    if not (run / CONFIG_FILE).is_file() or not is_finished(run):
        raise ValueError(f"schedule is {run}, which is not the folder of a finished run")
    if (run / PARENT_FILE).exists():
        raise ValueError(f"schedule is {run}, a fork; a run can be repeated from its beginning only")
    for field, (before, now) in differences(read_json(run / CONFIG_FILE), to_json(config)).items():
        if field not in _FREE and field.rpartition(".")[2] != "gpus" and before is not ABSENT:
            raise ValueError(f"schedule is {run}, where {field} was {before!r}, and it is {now!r}; it must be the same")


def _planned(step: int, seed: int, group: Group) -> Iterator[tuple[int, Planned]]:
    """The completions of a group, by their seeds."""
    for sample, rollout in enumerate(group.rollouts):
        prompt: tuple[int, ...] = ()
        for number, turn in enumerate(rollout.turns):
            prompt = join_tokens(prompt, turn.prompt_tokens)
            name = f"step {step}: turn {number} of rollout {sample} of problem {group.problem_id!r}"
            yield turn_seed(seed, sample, number), Planned(name, prompt, turn.completion)
            prompt = join_tokens(prompt, turn.completion.tokens)


class ScheduledGenerator:
    """A generator that samples each planned completion under the versions that sampled it."""

    def __init__(self, generator: Generator, planned: Mapping[int, Planned], patience_s: float = _PATIENCE_S) -> None:
        """`planned` are the completions by their seeds. A pull waits `patience_s` for a request that does not come."""
        self._generator, self._planned, self._patience_s = generator, planned, patience_s
        self._version = -1
        self._num_running = 0
        self._changed = asyncio.Condition()
        self._left = {seed: [version for version, _ in _parts(each)] for seed, each in planned.items()}
        self._num_left = Counter(itertools.chain.from_iterable(self._left.values()))  # parts by version

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1, *, policy: Policy = None
    ) -> list[Completion]:
        """The completions of the recorded run, sampled again. Raises `TrainingStoppedError` where they differ.

        Of a group that the recorded run never took, nothing is known, and the call waits until it is cancelled.
        """
        assert sampling.seed is not None
        seeds = range(sampling.seed, sampling.seed + num_samples)
        if num_samples > 1 and sampling.seed not in self._planned:
            await asyncio.Event().wait()
        return await all_results([self._repeat(prompt_tokens, replace(sampling, seed=s), policy) for s in seeds])

    async def pull_model_state_dict(
        self,
        version: int,
        *,
        policy: LivePolicy = None,
        frozen: bool = False,
        mode: PullMode = "drain",
        keep_prefix_cache: bool = False,
    ) -> None:
        """Pulls once all is sampled that older versions sampled. Raises `TrainingStoppedError` if that does not come.

        Raises ValueError for a run that was resumed: the versions that it began with are gone.
        """
        if self._version < 0 < version:
            raise ValueError("schedule is set, and a run that repeats another cannot be resumed; begin it anew")
        await self._await_older(version)
        await self._generator.pull_model_state_dict(
            version, policy=policy, frozen=frozen, mode=mode, keep_prefix_cache=keep_prefix_cache
        )
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    async def drop_policy(self, policy: Policy) -> None:
        """See `rl.protocols.Generator`."""
        await self._generator.drop_policy(policy)

    async def _await_older(self, version: int) -> None:
        async with self._changed:
            while any(number > 0 and each < version for each, number in self._num_left.items()):
                before = self._num_left.total()
                try:
                    async with asyncio.timeout(self._patience_s):
                        await self._changed.wait()
                except TimeoutError:
                    if not self._num_running and self._num_left.total() == before:
                        seed = next(s for s, left in self._left.items() if left and left[0] < version)
                        raise TrainingStoppedError(
                            f"{self._planned[seed].name} was sampled by version {self._left[seed][0]} in the recorded "
                            "run, and now nobody asks for it"
                        ) from None

    async def _repeat(self, prompt: Sequence[int], sampling: SamplingParams, policy: Policy) -> Completion:
        assert sampling.seed is not None
        planned = self._planned.get(sampling.seed)
        if planned is None or tuple(prompt) != tuple(planned.prompt):
            what = "a turn that the recorded run did not have" if planned is None else f"{planned.name}, another prompt"
            raise TrainingStoppedError(f"the environment asks for {what}: {list(prompt)[-20:]} at its end")
        done = 0
        for version, length in _parts(planned):
            async with self._changed:
                await self._changed.wait_for(lambda needed=version: self._version >= needed)
                self._num_running += 1
            try:
                tokens = join_tokens(tuple(prompt), planned.completion.tokens[:done])
                of_part = replace(sampling, max_tokens=length)
                (part,) = await self._generator.generate(tokens, of_part, policy=policy)
            finally:
                self._num_running -= 1
            _check_equal(part, planned, range(done, done + length), version)
            done += length
            async with self._changed:
                self._left[sampling.seed].pop(0)
                self._num_left[version] -= 1
                self._changed.notify_all()
        return planned.completion


def _parts(planned: Planned) -> Iterator[tuple[int, int]]:
    """The versions that sampled a completion, and how many tokens each did."""
    return ((version, len([*each])) for version, each in itertools.groupby(planned.completion.versions))


def _check_equal(part: Completion, planned: Planned, places: range, version: int) -> None:
    """Raises `TrainingStoppedError` unless a part has the tokens and log-probs that were recorded at these places."""
    start, recorded = places.start, planned.completion
    expected = [(recorded.tokens[place], np.float32(recorded.logprobs[place])) for place in places]
    found = [(token, np.float32(logprob)) for token, logprob in zip(part.tokens, part.logprobs, strict=True)]
    if found != expected or set(part.versions) != {version}:
        place = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(found))
        raise TrainingStoppedError(
            f"{planned.name} differs from the recorded run at token {start + place}: token and log-prob are "
            f"{found[place : place + 1]} under versions {set(part.versions)}, and were {expected[place : place + 1]} "
            f"under {version}"
        )
