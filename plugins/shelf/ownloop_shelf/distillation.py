"""On-policy distillation: a student samples, and its teachers grade the tokens or compare whole distributions with it.

    rollouts --> views: what a teacher reads, the same tokens or a prompt with a hint before them
                   |
                   +--> tokens: the sampled token of a position, or its most probable tokens
                            |
                            +--> each teacher's log-probs of them --> a batch for the student's loss

A teacher is another model, or the student itself with a hint: self-distillation, as in OPSD (the right answer,
https://arxiv.org/abs/2601.18734), SDFT (https://arxiv.org/abs/2601.19897) and SDPO (an answer of the group that did
better, https://arxiv.org/abs/2601.20802). The loop is `distill.py`.

Legend: D datums, T positions of one, N scored ones, K tokens of a position; q the student's log-prob when it sampled a
token, f the teacher's.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from controller.launching.hosts import Tell
from controller.runs import resolve_model
from rl.advantages import gae, gather_scored, kl_estimates, kl_from_generator, sampled_logprobs, scatter_scored
from rl.configuration import Positive, UpToOne, configuration, holds
from rl.images import join_tokens
from rl.protocols import Generator, Problem, ProblemOptions, Prompt, Trainer, given
from rl.rollouts.episodes import rollout_to_datum, with_inputs
from rl.rollouts.evaluation import Measurement
from rl.rollouts.rendering import Renderer
from rl.rollouts.tokenizer import load_tokenizer
from rl.sampling import MAX_TOPK_LOGPROBS
from rl.system.hf_config import read_config
from rl.types import Datum, ForwardBackwardOutput, Group, Rollout, SamplingParams, Turn

TokenIds = NDArray[np.int64]
Divergence = Literal["sampled", "reverse_kl", "forward_kl", "jensen_shannon"]
Hint = Literal["none", "answer", "peer"]
SELF = "self"
"""The teacher's name that stands for the student, as it is when it learns."""
_LARGEST_VOCABULARY = 4096


@configuration
class Objective:
    """What a student learns from the teachers of its own answers."""

    divergence: Divergence = "sampled"
    """"sampled" takes the reverse KL of sampled tokens as their advantages. The others are losses of `docs/losses.md`
    over the `top_k` tokens of each position."""
    top_k: int = 0
    """Most probable tokens of a position that a divergence is a sum over: up to 20, or -1 for the whole vocabulary.
    They are the student's; for "forward_kl" under a hint, the student's with the hint."""
    discount: UpToOne = 0.0
    """Of "sampled": with 0 a token answers for its own divergence only, with 1 also for that of all tokens after it."""
    hint: Hint = "none"
    """What teachers read and the student does not: the problem's right "answer", or the answer of a "peer", the best
    rollout of its group, if that is better. Rollouts without a hint are then not learned from."""
    hint_text: Annotated[str, holds("{hint}")] = (
        "Here is a correct answer, for reference:\n{hint}\n\nNow answer in your own words."
    )
    """How a hint is added to the user's last message, or put before a prompt of text."""
    task_teachers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Task of a `Mixture` -> the teacher of its problems, in the place of the recipe's `teacher`."""
    more_teachers: Mapping[str, Positive] = field(default_factory=dict[str, float])
    """Further teachers with their weights. `teacher` has the rest of 1, and the loss is the weighted sum of theirs."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        sampled = self.divergence == "sampled"
        if not (self.top_k == 0 if sampled else self.top_k == -1 or 1 <= self.top_k <= MAX_TOPK_LOGPROBS):
            accepted = "0" if sampled else f"from 1 to {MAX_TOPK_LOGPROBS}, or -1 for all"
            raise ValueError(
                f"objective.top_k is {self.top_k}; with divergence {self.divergence!r} it must be {accepted}"
            )
        if self.discount and not sampled:
            raise ValueError(f"objective.discount is {self.discount}; only divergence 'sampled' has one: leave it at 0")
        if not sum(self.more_teachers.values()) < 1:
            raise ValueError(f"objective.more_teachers is {dict(self.more_teachers)}; weights must be below 1 in sum")

    def names(self, teacher: str) -> tuple[str, ...]:
        """All teachers, the recipe's first. Raises ValueError for a student without a hint as its own teacher."""
        names = tuple(dict.fromkeys((teacher, *self.task_teachers.values(), *self.more_teachers)))
        if SELF in names and self.hint == "none":
            raise ValueError("teacher is 'self' and objective.hint is 'none', so nothing is taught; set objective.hint")
        return names

    def check(self, teacher: str, *, replays: bool) -> None:
        """Raises ValueError as `names` does, and in a replay for what a recording lacks."""
        self.names(teacher)
        if replays and (self.hint != "none" or self.top_k):
            raise ValueError(
                f"objective.hint is {self.hint!r} and objective.top_k {self.top_k}; a replay has neither problems "
                "for hints nor a generator that names tokens: set them to 'none' and 0"
            )

    def models(self, teacher: str, student: Path, problems: Sequence[Problem]) -> list[str]:
        """The teachers to start: all but the student.

        Raises ValueError for a problem without an answer, if that is the hint, and for the whole of a large vocabulary.
        """
        for problem in problems:
            if self.hint == "answer" and given(ProblemOptions, problem).answer is None:
                raise ValueError(
                    f"objective.hint is 'answer' and problem {problem.id!r} has no attribute `answer`; use 'peer'"
                )
        if self.top_k == -1 and vocab_size(student) > _LARGEST_VOCABULARY:
            raise ValueError(
                f"objective.top_k is -1 and the model has {vocab_size(student)} tokens; each is scored as a position "
                f"of its own, which is for up to {_LARGEST_VOCABULARY}; use at most {MAX_TOPK_LOGPROBS}"
            )
        return [name for name in self.names(teacher) if name != SELF]

    @property
    def loss(self) -> str:
        """The student's loss."""
        return "importance_sampling" if self.divergence == "sampled" else self.divergence

    def shares(self, teacher: str, task: str) -> dict[str, float]:
        """Teacher -> its weight for a problem of a task. They add up to 1."""
        if task in self.task_teachers:
            return {self.task_teachers[task]: 1.0}
        return {**self.more_teachers, teacher: 1 - sum(self.more_teachers.values())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """Answers of the student, and what its teachers say about them."""

    sampled: list[Datum]
    """[D] the answers, as they were sampled."""
    batch: list[Datum]
    """What the student learns from: `sampled` with advantages, or a datum for each token and teacher."""
    fraction: float
    """The part of the rollouts that these are: others have no sampled token, or no hint."""
    logprobs: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])
    """One [T] per answer: the teachers' log-probs of sampled tokens, weighted. Empty if tokens are compared."""

    def metrics(self, output: ForwardBackwardOutput) -> dict[str, float]:
        """`kl_to_teacher` per sampled token: k3, or the divergence over tokens, which is the loss of `batch`.

        And `graded_fraction`, the part of the step's rollouts that could be graded.
        """
        num_tokens = sum(datum.num_loss_tokens for datum in self.sampled)
        kl = kl_from_generator(self.sampled, self.logprobs) if self.logprobs else output.metrics["loss"] / num_tokens
        return {"kl_to_teacher": kl, "graded_fraction": self.fraction}


@dataclass(frozen=True, slots=True)
class Teachers:
    """The teachers of a run, and their student."""

    objective: Objective
    teacher: str
    frozen: Sequence[Trainer]
    """In the order of `Objective.models`."""
    student: Trainer
    generator: Generator
    """It samples from the student."""
    renderer: Renderer
    model: Path
    """The student's directory."""

    @property
    def trainers(self) -> dict[str, Trainer]:
        """Every teacher by its name."""
        others = iter(self.frozen)
        return {name: self.student if name == SELF else next(others) for name in self.objective.names(self.teacher)}

    async def grade(self, groups: Sequence[Group], problems: Mapping[str, Problem]) -> Graded:
        """Grades the rollouts of a step. `problems` has the groups' problems by id, for hints."""
        rollouts, views, tasks = list[Rollout](), list[Rollout](), list[str]()
        for group in groups:
            for rollout in group.rollouts:
                view = self._view(group, rollout, problems)
                if rollout.num_sampled_tokens and view is not None:
                    rollouts.append(rollout)
                    views.append(view)
                    tasks.append(group.problem_id.partition(": ")[0])  # as `ownloop_tasks.mixture` names them
        sampled = [rollout_to_datum(rollout, 0.0) for rollout in rollouts]
        read = sampled if self.objective.hint == "none" else [rollout_to_datum(view, 0.0) for view in views]
        fraction = len(sampled) / max(sum(len(group.rollouts) for group in groups), 1)
        if not sampled:
            return Graded(sampled=[], batch=[], fraction=fraction)
        if self.objective.divergence == "sampled":
            graded = await self._logprobs(sampled, read, tasks)
            logprobs = [np.array(sum(w * f for w, f in of_datum), np.float32) for of_datum in graded]
            batch = reverse_kl_advantages(sampled, logprobs, discount=self.objective.discount)
            return Graded(sampled=sampled, batch=batch, fraction=fraction, logprobs=logprobs)
        tokens = await self._most_probable(views if self.objective.divergence == "forward_kl" else rollouts)
        expanded, read = over_tokens(sampled, tokens), over_tokens(read, tokens)
        task_of_each = [task for task, each in zip(tasks, tokens, strict=True) for _ in each.T]
        graded = await self._logprobs(expanded, read, task_of_each)
        batch = [
            with_inputs([datum.weighted(share)], teacher_logprobs=[f])[0]
            for datum, of_datum in zip(expanded, graded, strict=True)
            for share, f in of_datum
        ]
        return Graded(sampled=sampled, batch=batch, fraction=fraction)

    def _view(self, group: Group, rollout: Rollout, problems: Mapping[str, Problem]) -> Rollout | None:
        """What teachers read of a rollout; None without a hint, or without the room for it."""
        if self.objective.hint == "none":
            return rollout
        problem = problems[group.problem_id]
        if self.objective.hint == "peer":
            best = max(group.rollouts, key=lambda each: each.reward)
            hint = best.text if best.reward > rollout.reward else None
        else:
            hint = given(ProblemOptions, problem).answer
        if hint is None:
            return None
        prompt = with_hint(problem.prompt, self.objective.hint_text.replace("{hint}", str(hint)))
        view = hinted(rollout, self.renderer.encode(prompt, given(ProblemOptions, problem).tools))
        size = sum(len(turn.prompt_tokens) + len(turn.completion.tokens) for turn in view.turns)
        return view if size <= (self.renderer.max_model_len or size) else None

    async def _logprobs(
        self, student: Sequence[Datum], read: Sequence[Datum], tasks: Sequence[str]
    ) -> list[list[tuple[float, NDArray[np.float32]]]]:
        """Of each datum, the weight of each of its teachers with the log-probs [T] of the targets that it gives."""
        shares = [self.objective.shares(self.teacher, task) for task in tasks]
        trainers = self.trainers
        pupils = {name: [i for i, of_datum in enumerate(shares) if name in of_datum] for name in trainers}

        async def ask(name: str) -> list[NDArray[np.float32]]:
            views = [read[i] for i in pupils[name]]  # a trainer refuses an empty batch
            return gather_scored(views, (await trainers[name].forward(views)).logprobs) if views else []

        answers = await asyncio.gather(*map(ask, pupils))
        found: list[list[tuple[float, NDArray[np.float32]]]] = [[] for _ in student]
        for (name, asked), values in zip(pupils.items(), answers, strict=True):
            for i, of_scored in zip(asked, values, strict=True):
                found[i].append((shares[i][name], scatter_scored(student[i], of_scored)))
        return found

    async def _most_probable(self, rollouts: Sequence[Rollout]) -> list[TokenIds]:
        """[N, K] of each rollout: the most probable tokens in the place of its sampled tokens, by the generator."""
        if self.objective.top_k == -1:
            every = np.arange(vocab_size(self.model))
            return [np.tile(every, (rollout.num_sampled_tokens, 1)) for rollout in rollouts]
        sampling = SamplingParams(max_tokens=1, temperature=0.0, topk_prompt_logprobs=self.objective.top_k)

        async def ask(rollout: Rollout) -> TokenIds:
            parts = [part for turn in rollout.turns for part in (turn.prompt_tokens, turn.completion.tokens)]
            (scored,) = await self.generator.generate(join_tokens(*parts), sampling)
            assert scored.topk_prompt_logprobs is not None
            best = np.array([[token for token, _ in row] for row in scored.topk_prompt_logprobs])
            return best[rollout_to_datum(rollout, 0.0).counted]

        return await asyncio.gather(*(ask(rollout) for rollout in rollouts))


def reverse_kl_advantages(
    batch: Sequence[Datum], teacher: Sequence[NDArray[np.float32]], *, discount: float = 0.0
) -> list[Datum]:
    """Adds `advantages` to the batch: advantage_t = sum over s >= t of discount^(s - t) (f_s - q_s), minus a baseline.

    The policy gradient with these advantages reduces KL(student || teacher). The baseline is the mean over all tokens
    of the batch; it reduces the variance. `teacher` holds the teacher's log-probs, one [T] per datum.

    With discount 0 a token is credited with its own divergence only: biased, but of low variance
    (https://thinkingmachines.ai/blog/on-policy-distillation). With discount 1 it is credited with that of all later
    tokens, which is the unbiased gradient of the sequence's KL: eq. 3 of MiniLLM, https://arxiv.org/abs/2306.08543.
    """
    pairs = zip(sampled_logprobs(batch), gather_scored(batch, teacher), strict=True)
    rewards = [-kl_estimates(q, f, "k1") for q, f in pairs]
    # With values of 0 and lambda 1, GAE's advantages are discounted sums of rewards.
    sums = [gae(reward, np.zeros(len(reward)), gamma=discount, gae_lambda=1.0)[0] for reward in rewards]
    baseline = np.concatenate(sums).mean()
    advantages = [scatter_scored(datum, values - baseline) for datum, values in zip(batch, sums, strict=True)]
    return with_inputs(batch, advantages=advantages)


def vocab_size(model: Path) -> int:
    """The tokens of a model that have a log-prob."""
    return read_config(model)["vocab_size"]


def over_tokens(batch: Sequence[Datum], tokens: Sequence[TokenIds]) -> list[Datum]:
    """A datum for each token: K copies of each datum, with column k of its tokens [N, K] as targets.

    A trainer computes the tokens of the copies once. Tokens are scored among all tokens at temperature 1, however the
    answers were sampled: the divergence is that of the models themselves.
    """
    expanded: list[Datum] = []
    for datum, of_datum in zip(batch, tokens, strict=True):
        for targets in of_datum.T:
            array = np.zeros(len(datum.tokens), np.int64)
            array[datum.counted] = targets
            inputs = {"target_tokens": array, "weights": datum.weights}
            expanded.append(replace(datum, loss_inputs=inputs, temperature=1.0, kept=None))
    return expanded


def with_hint(prompt: Prompt, hint: str) -> Prompt:
    """The prompt with a hint: before a text, and after the last message of the user in a chat."""
    if isinstance(prompt, str):
        return f"{hint}\n{prompt}"
    messages = [dict(message) for message in prompt]
    last = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if last is None:
        raise ValueError("objective.hint is added to a message of the user, and the problem's prompt has none")
    content: Any = last["content"]
    last["content"] = f"{content}\n\n{hint}" if isinstance(content, str) else [*content, {"type": "text", "text": hint}]
    return messages


def hinted(rollout: Rollout, prompt_tokens: tuple[int, ...]) -> Rollout:
    """The rollout as if its prompt had been another one. The experts that the generator chose belong to the prompt."""
    turns = [replace(turn, completion=replace(turn.completion, routes=None)) for turn in rollout.turns]
    return replace(rollout, turns=(replace(turns[0], prompt_tokens=prompt_tokens), *turns[1:]))


async def eval_kl(teachers: Teachers, problems: Sequence[Problem], sampling: SamplingParams) -> Measurement:
    """KL(student || teachers) per token, estimated by k3 for each problem from one answer that the student samples.

    Both sides are scored under the distribution that was sampled from: where it is cut, so is the teacher's. `sampling`
    should have a seed: two measurements with the same seed differ, as far as sampling allows, only because the student
    changed. Problems whose teachers read a hint are measured with it.
    """

    async def answer(index: int, problem: Problem) -> Group:
        prompt = teachers.renderer.encode_problem(problem)
        seeded = replace(sampling, seed=(sampling.seed or 0) + index)  # another seed for every problem
        (completion,) = await teachers.generator.generate(prompt, seeded, 1)
        rollout = Rollout(turns=(Turn(prompt_tokens=prompt, completion=completion),), reward=0.0)
        return Group(problem_id=problem.id, prompt="", rollouts=(rollout,))

    groups = await asyncio.gather(*(answer(index, problem) for index, problem in enumerate(problems)))
    objective = replace(teachers.objective, divergence="sampled", top_k=0)
    graded = await replace(teachers, objective=objective).grade(groups, {problem.id: problem for problem in problems})
    pairs = zip(sampled_logprobs(graded.sampled), gather_scored(graded.sampled, graded.logprobs), strict=True)
    return Measurement(values=np.array([kl_estimates(q, f, "k3").mean() for q, f in pairs]))


def resolve_teacher(name_or_path: str, student: Path, tell: Tell) -> Path:
    """`resolve_model` for a model that scores the student's tokens.

    Raises ValueError as `resolve_model` does, and if the teacher's tokenizer differs from the student's, because the
    same text would then be other tokens.
    """
    try:
        teacher = resolve_model(name_or_path, tell)
    except ValueError as error:
        raise ValueError(f"teacher: {error}; the recipe's file says how its teacher is made") from None
    ours, theirs = (load_tokenizer(path).get_vocab() for path in (student, teacher))
    if ours != theirs:
        differing = len({token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)})
        raise ValueError(
            f"teacher {teacher} has another tokenizer than the student {student}: {differing} of "
            f"{len(ours.keys() | theirs.keys())} tokens differ; a teacher of the same family is needed"
        )
    return teacher
