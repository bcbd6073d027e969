"""Evaluation on held-out data, with 95 % intervals for the uncertainty of a small sample."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rl.checks import errors_of_user_code
from rl.protocols import Generator, Problem, ProblemOptions, given
from rl.rollouts.episodes import rollout_groups
from rl.rollouts.guard import DEFAULT_TIME_LIMIT_S
from rl.rollouts.rendering import Renderer
from rl.system.timeline import report_progress
from rl.types import Group, SamplingParams

_NUM_RESAMPLES = 10_000
_SEED = 1 << 61  # larger than every seed of training (`rl.rollouts.episodes.step_seed`)
_RESAMPLED_AT_ONCE = 1 << 20  # values, which bounds the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its 95 % interval."""

    mean: float
    low: float
    high: float


_UNKNOWN = Interval(mean=math.nan, low=math.nan, high=math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One pass over the held-out problems."""

    groups: tuple[Group, ...] = ()
    """Of each held-out problem; none where only `measurements` were made."""
    best_reward: float = 1.0
    """The environment's best reward, from which on an answer counts as right."""
    best_rewards: tuple[float, ...] = ()
    """One per group where problems have best rewards of their own; empty for `best_reward`."""
    majorities: tuple[float, ...] = ()
    """For each problem with a rollout, the mean reward of the answer that was given most often; empty if unknown."""
    others: Mapping[str, "Evaluation"] = field(default_factory=dict[str, "Evaluation"])
    """Evaluations of further held-out sets by name, at the same weights."""
    measurements: Mapping[str, "Measurement"] = field(default_factory=dict[str, "Measurement"])
    """What else was measured on held-out data, by name, the most telling first."""

    @property
    def sets(self) -> Mapping[str, "Evaluation"]:
        """This evaluation under "", and each further one under the prefix of its metrics' names, such as "aime_"."""
        return {"": self, **{f"{name}_": each for name, each in self.others.items()}}

    @property
    def version(self) -> float:
        """The policy version that sampled the answers, the lowest if there were several; NaN without an answer."""
        turns = (turn for group in self.groups for rollout in group.rollouts for turn in rollout.turns)
        return min((float(version) for turn in turns for version in turn.completion.versions), default=math.nan)

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[P] mean reward of each problem that has at least one rollout."""
        return np.array([group.rewards.mean() for group in self._scored])

    @property
    def reward(self) -> Interval:
        """Mean reward over the problems; NaN if all rollouts failed."""
        return bootstrap(self.rewards) if self._scored else _UNKNOWN

    @property
    def num_samples(self) -> int:
        """Answers per problem, including failed ones."""
        return max((len(group.rollouts) + len(group.failures) for group in self.groups), default=0)

    @property
    def intervals(self) -> Mapping[str, Interval]:
        """`reward` and, with n > 1 answers per problem, `pass_at_<k>` for k = n and all powers of two up to n.

        Also `majority_at_<n>`, the mean of `majorities`: self-consistency, https://arxiv.org/abs/2203.11171. And the
        mean of each metric of the rollouts that begins with `reward_`, over the problems that have it.
        """
        n = self.num_samples
        ks = sorted({2**i for i in range(n.bit_length())} | {n}) if n > 1 else []
        parts: dict[str, list[float]] = {}
        for group in self._scored:
            for name in sorted(
                {name for each in group.rollouts for name in each.metrics if name.startswith("reward_")}
            ):
                values = [each.metrics[name] for each in group.rollouts if name in each.metrics]
                parts.setdefault(name, []).append(float(np.mean(values)))
        means = {name: bootstrap(np.array(values)) for name, values in parts.items()}
        if n > 1 and self.majorities:
            means = {f"majority_at_{n}": bootstrap(np.array(self.majorities)), **means}
        return {"reward": self.reward, **{f"pass_at_{k}": self.pass_at(k) for k in ks}, **means}

    def pass_at(self, k: int, *, solved: float | None = None) -> Interval:
        """Probability that one of k answers to a problem has a reward of at least `solved`, by default the best one.

        From n answers of which c are right, the unbiased estimate is 1 - C(n - c, k) / C(n, k), averaged over the
        problems: Chen et al. 2021, eq. 1 of https://arxiv.org/abs/2107.03374. Problems with fewer than k answers, after
        failures, are left out. A reward that misses `solved` by rounding counts.

        Raises ValueError unless k is between 1 and the number of answers per problem.
        """
        if not 1 <= k <= self.num_samples:
            raise ValueError(
                f"k is {k}; it must be between 1 and the number of answers per problem, {self.num_samples}"
            )
        bests = [solved] * len(self.groups) if solved is not None else self.best_rewards
        pairs = zip(self.groups, bests or [self.best_reward] * len(self.groups), strict=True)
        rates = [_pass_at(k, _at_least(group.rewards, best)) for group, best in pairs if len(group.rollouts) >= k]
        return bootstrap(np.array(rates)) if rates else _UNKNOWN

    def gain_over(self, before: "Evaluation") -> Interval:
        """Mean change of the reward since an earlier evaluation of the same problems, paired by problem.

        Problems without a rollout in either evaluation are left out. Raises ValueError unless both have the same
        problems in the same order.
        """
        ours, theirs = ([group.problem_id for group in e.groups] for e in (self, before))
        if ours != theirs:
            raise ValueError(
                f"gain_over compares evaluations of the same problems; these have {len(ours)} and {len(theirs)} "
                f"problems, of which {len({*ours} & {*theirs})} are in both"
            )
        pairs = zip(self.groups, before.groups, strict=True)
        gains = [new.rewards.mean() - old.rewards.mean() for new, old in pairs if new.rollouts and old.rollouts]
        return bootstrap(np.array(gains)) if gains else _UNKNOWN

    @property
    def _scored(self) -> list[Group]:
        return [group for group in self.groups if group.rollouts]


def _at_least(rewards: NDArray[np.float64], solved: float) -> NDArray[np.bool_]:
    return (rewards >= solved) | np.isclose(rewards, solved, rtol=1e-9, atol=1e-12)


async def evaluate(
    generator: Generator,
    renderer: Renderer,
    problems: Sequence[Problem],
    sampling: SamplingParams,
    num_samples: int = 1,
    *,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    best_reward: float = 1.0,
) -> Evaluation:
    """Samples answers to each problem with the generator's current weights. `eval_sampling` makes `sampling`.

    A call of the environment may take `time_limit_s`, and `best_reward` is the reward of a right answer.
    """
    groups = await rollout_groups(
        generator,
        renderer,
        problems,
        sampling,
        num_samples,
        time_limit_s=time_limit_s,
        progress=lambda num_done: report_progress("evaluating", num_done, len(problems)),
    )
    scored = [(problem, group) for problem, group in zip(problems, groups, strict=True) if group.rollouts]
    majorities = tuple(_majority(problem, group) for problem, group in scored)
    own = (given(ProblemOptions, problem).best_reward for problem in problems)
    bests = tuple(best_reward if each is None else float(each) for each in own)
    return Evaluation(groups=tuple(groups), best_reward=best_reward, best_rewards=bests, majorities=majorities)


def _majority(problem: Problem, group: Group) -> float:
    """The mean reward of the rollouts with the most common answer; of several that are as common, of all of theirs."""
    with errors_of_user_code(f"answer_of of problem {problem.id!r} failed"):
        answer_of = given(ProblemOptions, problem).answer_of
        answers = [answer_of(rollout.turns[-1].completion.text) for rollout in group.rollouts]
    counts = Counter(answers)
    most = max(counts.values())
    return float(
        np.mean([r.reward for r, answer in zip(group.rollouts, answers, strict=True) if counts[answer] == most])
    )


def eval_sampling(sampling: SamplingParams, num_samples: int) -> tuple[SamplingParams, int]:
    """The last two arguments of `evaluate`, from the sampling of training and the number of answers per problem.

    A single answer is greedy. Several answers are sampled as in training, but with seeds that training never uses and
    that are the same in every evaluation.
    """
    greedy = num_samples == 1
    return replace(sampling, temperature=0.0) if greedy else replace(sampling, seed=_SEED), num_samples


def _pass_at(k: int, right: NDArray[np.bool_]) -> float:
    """The estimate of `Evaluation.pass_at` for one problem. Python's integers keep the binomials exact."""
    num_wrong = len(right) - int(right.sum())
    return 1 - math.comb(num_wrong, k) / math.comb(len(right), k)


def bootstrap(values: NDArray[np.float64], weights: NDArray[np.float64] | None = None) -> Interval:
    """Mean of [P] values with the 95 % interval of the percentile bootstrap (Efron and Tibshirani 1993, chapter 13).

    With `weights` [P], all above 0, it is the weighted mean. The resampling is seeded, so that the same values always
    give the same interval. Raises ValueError if there are no values or if one is not finite.
    """
    if len(values) == 0:
        raise ValueError("bootstrap needs at least one value")
    if not np.isfinite(values).all():
        raise ValueError(f"bootstrap was given {values[~np.isfinite(values)][0]}; every value must be finite")
    random = np.random.default_rng([*b"bootstrap"])
    resamples_at_once = max(_RESAMPLED_AT_ONCE // len(values), 1)
    counts = [min(resamples_at_once, _NUM_RESAMPLES - start) for start in range(0, _NUM_RESAMPLES, resamples_at_once)]
    picks = (random.integers(len(values), size=(count, len(values))) for count in counts)
    if weights is None:
        means = np.concatenate([values[pick].mean(axis=1) for pick in picks])
    else:
        products = values * weights
        means = np.concatenate([products[pick].sum(axis=1) / weights[pick].sum(axis=1) for pick in picks])
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(mean=float(np.average(values, weights=weights)), low=float(low), high=float(high))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A quantity other than reward, measured on held-out data: a loss, an accuracy, a divergence."""

    values: NDArray[np.float64]
    """[P] one per held-out item."""
    weights: NDArray[np.float64] | None = None
    """[P] weight of each item, above 0; numbers of tokens make it a mean over tokens. None: all weights are equal."""

    @property
    def interval(self) -> Interval:
        """Mean over the items, with its 95 % interval."""
        return bootstrap(self.values, self.weights)

    def change_since(self, before: "Measurement") -> Interval:
        """Mean change since an earlier measurement of the same items, paired. Raises ValueError for other lengths."""
        if len(self.values) != len(before.values):
            raise ValueError(
                f"change_since compares measurements of the same items; these have {len(self.values)} and "
                f"{len(before.values)}"
            )
        return bootstrap(self.values - before.values, self.weights)
