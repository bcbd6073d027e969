"""Plays episodes: from problems to groups of scored rollouts, and from groups to datums for the trainer.

All problems of a step are in flight at once, every rollout continues independently after its first turn, and the
generator batches the requests. Sampled tokens are never tokenised again: a datum has exactly the sampled tokens.
"""

import asyncio
import hashlib
import inspect
import math
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rl.checks import MAX_FLOAT32, frames_below
from rl.images import images_of, join_tokens
from rl.protocols import Done, Episode, Generator, Observation, Problem, Prompt
from rl.rollouts.chats import text_of
from rl.rollouts.guard import DEFAULT_TIME_LIMIT_S, EnvironmentFailedError, call_environment
from rl.rollouts.rendering import ChatTemplateError, Renderer, prompt_text
from rl.sampling import Ids, KeptSets
from rl.types import Answer, Completion, Datum, Group, Rollout, SamplingParams, Turn, open_reasoning

_RUN_METRICS = {
    *("groups_with_signal", "env_failures", "completion_tokens_mean", "truncated_fraction", "turns_mean"),
    *("seconds_environment_max", "reward", "reward_mean", "reward_std", "reward_low", "reward_high"),
    *("step", "skipped", "loss", "grad_norm", "learning_rate", "policy_version", "entropy", "seconds_step"),
}
"""What every run reports: `rl.algorithms.metrics.rollout_metrics`, evaluations, and the row of a step."""
T = TypeVar("T")


async def rollout_groups(
    generator: Generator,
    renderer: Renderer,
    problems: Sequence[Problem],
    sampling: SamplingParams,
    num_samples: int,
    *,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    progress: Callable[[int], None] = lambda _num_done: None,
) -> list[Group]:
    """The groups of these problems, in order. All are in flight at once; see `rollout_group`.

    `progress` is called with the number of groups that are done: with 0, and after each.

    With a seed in `sampling`, problem i uses the seeds from seed + i * num_samples on, so that no two completions have
    the same seed.
    """

    num_done = 0

    async def one(index: int, problem: Problem) -> Group:
        nonlocal num_done
        seed = None if sampling.seed is None else sampling.seed + index * num_samples
        seeded = replace(sampling, seed=seed)
        group = await rollout_group(generator, renderer, problem, seeded, num_samples, time_limit_s=time_limit_s)
        num_done += 1
        progress(num_done)
        return group

    progress(0)
    return await all_results([one(index, problem) for index, problem in enumerate(problems)])


async def rollout_group(
    generator: Generator,
    renderer: Renderer,
    problem: Problem,
    sampling: SamplingParams,
    num_samples: int,
    *,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
) -> Group:
    """`num_samples` attempts at one problem, each of as many turns as its episode asks for.

    `sampling.max_tokens` limits each turn. When the context has no room for another turn, the episode ends as truncated
    and has the reward of its last observation. A call of the environment that raises, takes more than `time_limit_s`
    seconds or returns something invalid fails its rollout only; `Group.failures` says why and where. An exception of
    the generator is raised and cancels the other rollouts, and so is a `ChatTemplateError` for a model whose chat
    template is not fit for several turns.
    """
    player = Player(generator, renderer, sampling, time_limit_s)
    try:
        prompt = problem.prompt
        tokens = renderer.encode_problem(problem)
        if player.room(len(tokens)) < sampling.max_tokens:
            raise ValueError(
                f"its prompt of {len(tokens)} tokens leaves no room for max_tokens {sampling.max_tokens} in a context "
                f"of {renderer.max_model_len} (max_model_len)"
            )
    except Exception as error:  # the prompt comes from the environment, so this is its failure
        failed = f"problem {problem.id!r}: {type(error).__name__}: {error}{frames_below(error, __file__)}"
        return Group(problem_id=problem.id, prompt="", rollouts=(), failures=(failed,) * num_samples)
    text = prompt_text(prompt)
    completions = await generator.generate(tokens, sampling, num_samples)
    first_turns = [Turn(prompt_tokens=tokens, completion=completion, prompt=text) for completion in completions]
    played = await all_results([player.play(problem, i, turn) for i, turn in enumerate(first_turns)])
    return Group(
        problem_id=problem.id,
        prompt=text,
        rollouts=tuple(rollout for rollout in played if isinstance(rollout, Rollout)),
        failures=tuple(failure for failure in played if isinstance(failure, str)),
    )


def step_seed(seed: int, step: int) -> int:
    """The sampling seed of a step. Seeds of different steps and runs are at least 2^20 completions apart.

    `seed` is the run's, from 0 to `MAX_RUN_SEED`.
    """
    return (seed << 40) + (step << 20)  # room for 2^20 steps of 2^20 completions


def turn_seed(seed: int, sample: int, turn: int) -> int:
    """The seed of a turn of a group with this seed. Later ones than the first are a hash of sample's seed and turn."""
    if turn == 0:
        return seed + sample
    key = f"{seed + sample}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 2  # 62 bits: a positive int64


@dataclass(frozen=True, slots=True)
class Player:
    """Plays the rollouts of a group, each from its first turn on."""

    generator: Generator
    renderer: Renderer
    sampling: SamplingParams
    time_limit_s: float

    async def play(self, problem: Problem, sample: int, first: Turn) -> Rollout | str:
        """The rollout that begins with this turn, or a sentence that says how the environment failed."""
        try:
            return await self._play(problem, sample, first)
        except EnvironmentFailedError as error:
            return f"problem {problem.id!r}: {error}{error.frames}"

    def room(self, num_tokens: int) -> int:
        """Tokens that fit into the context after `num_tokens`."""
        context = self.renderer.max_model_len
        return sys.maxsize if context is None else context - num_tokens

    async def _play(self, problem: Problem, sample: int, first: Turn) -> Rollout:
        turns, prompt, environment_s = [first], problem.prompt, 0.0
        sequence = join_tokens(first.prompt_tokens, first.completion.tokens)
        earlier = None if isinstance(prompt, str) else [*prompt]
        episode: Episode = await call_environment(problem.start, time_limit_s=self.time_limit_s)
        while True:
            start = time.perf_counter()
            answer = self._answer(prompt, turns[-1])
            reply = await call_environment(episode.reply, answer, time_limit_s=self.time_limit_s)
            environment_s += time.perf_counter() - start
            reward = checked_reward(reply)
            if isinstance(reply, Done):
                metrics = {name: float(value) for name, value in reply.metrics.items()}
                return self._rollout(turns, reward, environment_s, metrics=metrics)
            tokens = self._encode_reply(reply, turns[-1].completion, earlier)
            sequence = join_tokens(sequence, tokens)
            room = self.room(len(sequence))
            if room < 1:  # `reward` is the observation's: what the episode is worth if it ends here
                return self._rollout(turns, reward, environment_s, out_of_context=True)
            seed = None if self.sampling.seed is None else turn_seed(self.sampling.seed, sample, len(turns))
            sampling = replace(self.sampling, max_tokens=min(self.sampling.max_tokens, room), seed=seed)
            prompt = reply.messages
            if earlier is not None and not isinstance(prompt, str):
                earlier += [{"role": "assistant"}, *prompt]
            (completion,) = await self.generator.generate(sequence, sampling, 1)
            turns.append(Turn(prompt_tokens=tokens, completion=completion, prompt=prompt_text(prompt)))
            sequence = join_tokens(sequence, completion.tokens)

    def _answer(self, prompt: Prompt, turn: Turn) -> Answer:
        """What the model said. It begins inside reasoning if its prompt ends there."""
        last = {} if isinstance(prompt, str) else prompt[-1]
        begun = text_of(last.get("content")) if last.get("role") == "assistant" else ""
        opening = open_reasoning(begun) or self.renderer.opening(turn.prompt_tokens)
        return Answer.read(turn.completion.text, opening=opening, is_cut_off=turn.completion.truncated)

    def _rollout(self, turns: Sequence[Turn], reward: float, environment_s: float, **more: Any) -> Rollout:
        return Rollout(turns=tuple(turns), reward=reward, environment_s=environment_s, sampling=self.sampling, **more)

    def _encode_reply(
        self, reply: Observation, answer: Completion, earlier: Sequence[Mapping[str, object]] | None
    ) -> tuple[int, ...]:
        """The tokens of an observation. Raises `EnvironmentFailedError` if it cannot be rendered."""
        chat = earlier is not None
        if chat == isinstance(reply.messages, str):
            forms = ("text", "messages")
            raise EnvironmentFailedError(f"its prompt is {forms[chat]} and its observation {forms[not chat]}")
        try:
            return self.renderer.encode_reply(reply.messages, answer.tokens, *([earlier] if earlier else ()))
        except ChatTemplateError:  # of the model: no episode of several turns can be played
            raise
        except Exception as error:  # not a message, or one that the chat template refuses
            raise EnvironmentFailedError(f"its observation cannot be rendered: {error}") from error


def checked_reward(reply: object) -> float:
    """The reward of an environment's reply. Raises `EnvironmentFailedError` for an invalid reply, reward or metric."""
    if not isinstance(reply, Observation | Done):
        raise EnvironmentFailedError(f"it replied with a {type(reply).__name__}; an Observation or a Done is expected")
    metrics = reply.metrics if isinstance(reply, Done) else {}
    if taken := sorted(_RUN_METRICS & metrics.keys()):
        raise EnvironmentFailedError(f"its metric {taken[0]!r} has the name of one that every run reports; rename it")
    for name, value in {"reward": reply.reward, **metrics}.items():
        if not _is_finite_float32(value):
            raise EnvironmentFailedError(f"its {name} is {value!r}; it must be a finite number")
    return float(reply.reward)


def _is_finite_float32(number: Any) -> bool:
    """Whether the value is a number that is finite in float32, the dtype of advantages."""
    try:
        return math.isfinite(number) and abs(float(number)) <= MAX_FLOAT32
    except (TypeError, ValueError, OverflowError):  # not a number; an array; an integer too large for a float
        return False


async def all_results(awaitables: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order. The first failure cancels the others and is raised unchanged."""
    try:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(awaitable) for awaitable in awaitables]
        return [task.result() for task in started]
    except BaseExceptionGroup as errors:
        failure = errors.exceptions[0]
    raise failure  # outside of the except clause, so that no exception group is attached as its context


def group_to_data(
    group: Group,
    advantage: Callable[..., NDArray[np.float64]],
    *,
    keep: Callable[[Rollout], bool] = lambda _rollout: True,
) -> list[Datum]:
    """One Datum per rollout for which `keep` is true. Rollouts that are not kept still count in the advantages.

    `advantage` is as `group_advantages` takes it. Left out are rollouts without a sampled token, groups whose
    advantages are all 0, and groups that failures have reduced to fewer than two rollouts.
    """
    advantages = group_advantages(group, advantage)
    if not advantages.any():
        return []
    return [
        rollout_to_datum(rollout, value)
        for rollout, value in zip(group.rollouts, advantages, strict=True)
        if rollout.num_sampled_tokens and keep(rollout)
    ]


def group_advantages(group: Group, advantage: Callable[..., NDArray[np.float64]]) -> NDArray[np.float64]:
    """[G] advantages of a group's rollouts; 0 if failures have reduced it to fewer than two.

    `advantage` maps [G] rewards to [G] advantages. One with a parameter `lengths` also gets the [G] numbers of sampled
    tokens. Raises ValueError unless it returns one finite number per reward.
    """
    if group.failures and len(group.rollouts) < 2:  # nothing to compare with; `advantage` may refuse a group of one
        return np.zeros(len(group.rollouts))
    takes_lengths = "lengths" in inspect.signature(advantage).parameters
    lengths = {"lengths": np.array([r.num_sampled_tokens for r in group.rollouts])} if takes_lengths else {}
    advantages = np.asarray(advantage(group.rewards, **lengths), dtype=np.float64)
    if advantages.shape != group.rewards.shape or not np.isfinite(advantages).all():
        said = f"shape {advantages.shape}: {advantages}"
        raise ValueError(f"advantage returned {said:.200}; one finite number for each of {len(group.rollouts)} rewards")
    return advantages


async def groups_to_data(
    groups: Sequence[Group],
    advantage: Callable[..., NDArray[np.float64]],
    *,
    keep: Callable[[Rollout], bool] = lambda _rollout: True,
) -> list[Datum]:
    """`group_to_data` of all groups, in order. Other tasks run between two groups, however many tokens they have."""
    batch: list[Datum] = []
    for group in groups:
        batch += group_to_data(group, advantage, keep=keep)
        await asyncio.sleep(0)
    return batch


def with_tokens(groups: Sequence[Group]) -> list[Rollout]:
    """The rollouts of all groups, in order, without those in which the model sampled no token."""
    return [rollout for group in groups for rollout in group.rollouts if rollout.num_sampled_tokens]


def check_sampled_distribution(sampling: SamplingParams) -> None:
    """Raises ValueError unless rollouts are sampled from a distribution whose log-probs the trainer computes."""
    if sampling.temperature == 0:
        raise ValueError(
            "sampling.temperature is 0.0; training rollouts need at least 0.01: they are sampled, not greedy"
        )


def rollout_to_datum(rollout: Rollout, advantage: float | NDArray[np.floating]) -> Datum:
    """The tokens of all turns as one sequence, shifted by one. The weight is 1 where the target token was sampled.

    `advantage` is one number for the rollout, or one for each sampled token [N]. Legend: T + 1 tokens of all turns, of
    which N were sampled. Without a sampled token nothing is scored, and T is the length of the prompt. Raises
    ValueError for a prompt without tokens, for a wrong number of advantages, for turns of different temperatures, for
    greedy rollouts, and for a cut without a record of the tokens that it kept.
    """
    if rollout.sampling is not None:
        check_sampled_distribution(rollout.sampling)
    temperatures = {turn.completion.temperature for turn in rollout.turns}
    if len(temperatures) > 1:
        raise ValueError(f"the rollout's turns were sampled at temperatures {sorted(temperatures)}; a datum has one")
    if not rollout.turns[0].prompt_tokens:
        raise ValueError("the rollout's prompt has no tokens; a first token has nothing to be predicted from")
    if np.shape(advantage) not in ((), (rollout.num_sampled_tokens,)):
        raise ValueError(
            f"advantage has shape {np.shape(advantage)}; it must be one number, or one for each of the rollout's "
            f"{rollout.num_sampled_tokens} sampled tokens"
        )
    whole = join_tokens(*(part for turn in rollout.turns for part in (turn.prompt_tokens, turn.completion.tokens)))
    sequence = [*whole]
    sampled: list[bool] = []
    for turn in rollout.turns:
        sampled += [False] * len(turn.prompt_tokens) + [True] * len(turn.completion.tokens)
    if not any(sampled):  # a target for the last token of the prompt; any will do, because it is not scored
        sequence.append(sequence[-1])
        sampled.append(False)
    kept = _kept(rollout)
    tokens, scored = np.array(sequence, dtype=np.int64), np.array(sampled[1:])
    logprobs, advantages = np.zeros((2, len(scored)), dtype=np.float32)
    logprobs[scored] = [logprob for turn in rollout.turns for logprob in turn.completion.logprobs]
    advantages[scored] = advantage
    return Datum(
        tokens=tokens[:-1],
        loss_inputs={
            "target_tokens": tokens[1:],
            "weights": scored.astype(np.float32),
            "logprobs": logprobs,
            "advantages": advantages,
        },
        temperature=temperatures.pop(),
        kept=None if kept is None else kept.part(1, len(tokens)),
        routes=_routes(rollout),
        images=images_of(whole),
    )


def _kept(rollout: Rollout) -> KeptSets | None:
    """The kept sets of the tokens of all turns; None if nothing was cut off."""
    parts: list[KeptSets] = []
    for turn in rollout.turns:
        completion, size = turn.completion, len(turn.completion.tokens)
        if completion.kept is None and size and rollout.sampling is not None and rollout.sampling.cuts:
            raise ValueError(
                f"sampling keeps {rollout.sampling.most_kept} tokens and the completions have no `kept` tokens, among "
                "which the trainer would have to score them; a generator on GPUs needs GeneratorConfig.kept_sets=True"
            )
        parts += [KeptSets.whole(len(turn.prompt_tokens)), completion.kept or KeptSets.whole(size)]
    if all(turn.completion.kept is None for turn in rollout.turns):
        return None
    return KeptSets.joined(parts)


def _routes(rollout: Rollout) -> Ids | None:
    """The experts of all tokens but the last; None if the generator returned none.

    A turn's generator was the first to compute the turn's prompt and, before it, the last token of the turn before.
    """
    parts: list[Ids] = []
    for turn in rollout.turns:
        if (routes := turn.completion.routes) is None:
            return None
        new = len(turn.prompt_tokens) + bool(parts)
        parts += [routes.prompt[len(routes.prompt) - new :], routes.sampled]
    return np.concatenate(parts)


def with_inputs(batch: Sequence[Datum], **inputs: Sequence[np.ndarray]) -> list[Datum]:
    """Adds loss inputs to a batch. Each is a sequence of one [T] per datum.

    batch = with_inputs(batch, reference_logprobs=(await reference.forward(batch)).logprobs)

    Raises ValueError if an input does not have one array per datum.
    """
    for name, arrays in inputs.items():
        if len(arrays) != len(batch):
            raise ValueError(f"{name} has {len(arrays)} arrays; the batch has {len(batch)} datums")
    return [
        replace(datum, loss_inputs={**datum.loss_inputs, **{name: arrays[i] for name, arrays in inputs.items()}})
        for i, datum in enumerate(batch)
    ]
