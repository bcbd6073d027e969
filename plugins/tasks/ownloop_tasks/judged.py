"""Rewards by a judge: another model, anywhere behind an API that speaks OpenAI's chat completions.

    JudgedEnv(env=..., judge=Judge(base_url="http://127.0.0.1:8000/v1", model="Qwen/Qwen3-8B"))

The environment plays its episodes as always; at the end of each, the judge reads the conversation, and its score takes
the place of the environment's reward. A judge that fails costs a rollout, never the run. `reward_model.py` has
a judge that is a reward model in this process.
"""

import asyncio
import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Protocol
from weakref import WeakKeyDictionary

from pydantic import AfterValidator, NonNegativeInt, PositiveInt

from ownloop_tasks.around import AroundProblem
from rl.configuration import AsItIs, Positive, configuration, holds
from rl.protocols import Done, Episode, Problem, ProblemOptions, Prompt, Reply, given
from rl.rollouts.guard import DEFAULT_TIME_LIMIT_S, Environment, call_environment, time_limit_of, waiting
from rl.rollouts.rendering import prompt_text
from rl.types import Answer

_TEMPLATE = """Rate the answer to the question below from {lowest} (useless) to {highest} (excellent).

Question:
{prompt}

Answer:
{answer}

Reply with the number alone."""

_COMPLETE = (None, "stop", "eos", "end_turn", "stop_sequence")  # as servers of several makers say it
_MINUS = dict.fromkeys((0x2212, 0xFE63, 0xFF0D, *range(0x2010, 0x2014)), "-")
# A number that is neither in another nor the end of a scale, such as the 10 of "8/10" and "8 out of 10".
_BEFORE = r"(?<![\d/])(?<!\d[.,])(?<!/ )(?<!\bof )(?<![^\w.]\.)(?<!\A\.)"
_NUMBER = _BEFORE + r"-?(?:\d+(?:[.,]\d+)?|(?<![\w.])\.\d+)(?![.,]?\d)"
_ALONE = _NUMBER + r"(?![\s*_`]*+(?:/|out of\b)[\s*_`]*+\d)"  # and not on another scale
# In the order in which they are looked for; `{{end}}` stands for the end of the scale.
_SCORES = (
    rf"({_NUMBER})[\s*_`]*+(?:points?|stars?)?[\s*_`(]*+(?:/|(?:out )?of\b)[\s*_`]*+{{end}}(?![.,]?\d)",
    rf"(?i)\b(?:score|rating|grade|mark)\b[^\w\n]{{{{0,10}}}}?(?:(?:is|of|as|at)\b[^\w\n]{{{{0,10}}}}?)?({_ALONE})",
    rf"(?m)^[^\w\n]*?({_ALONE})[^\w\n]*+$",
    rf"\A[^\w\n]*?({_ALONE})(?:\W*?[.:;,)\-]\s|[\s*_`]*+\(|[*_`]*+\s+(?:because|since|as|but)\b)(?![^\0]*\n *2[.)])",
    _ALONE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The judge's words, and their cost."""

    said: str = ""
    reward: float = 0.0
    finish_reason: str | None = None
    """Why the judge's words end, as its server says."""
    problem: str = ""
    """Why it has no reward; empty if it has one."""
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_retries: int = 0


class AnyJudge(Protocol):
    """Rates a conversation."""

    @property
    def model(self) -> str:
        """The judge's name."""
        ...

    @property
    def time_limit_s(self) -> float:
        """Most seconds for one judgement."""
        ...

    @property
    def failure_reward(self) -> float | None:
        """See `Judge.failure_reward`."""
        ...

    def check(self) -> None:
        """Raises ValueError, before a run starts any process, if it cannot judge."""
        ...

    async def rate(self, prompt: Prompt, turns: Sequence[Mapping[str, str]]) -> Judgement:
        """Rates the prompt with the messages after it: answers without their reasoning, and what the environment said.

        It fails by an exception, or a judgement with a `problem`.
        """
        ...


def _check_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"Input should be a regular expression: {error}") from None
    return text


@configuration
class Judge:
    """A judge: its address, its question, and the reward when it fails."""

    base_url: str
    """The server's address up to and with the version, such as "http://127.0.0.1:8000/v1"."""
    model: str
    """The judge's name on that server."""
    api_key_variable: str = ""
    """The environment variable that holds the key, such as "OPENAI_API_KEY". Empty for a server that needs none."""
    template: Annotated[str, holds("{prompt}"), holds("{answer}")] = _TEMPLATE
    """What the judge is asked. `{prompt}` and `{answer}` stand for the conversation, `{lowest}` and `{highest}` for the
    scale."""
    score_pattern: Annotated[str, AfterValidator(_check_pattern)] = ""
    """A regular expression: its last match in the judge's answer is the score, its first group if it has one. Without
    one, the score is the last number with the scale behind it ("7/10"), or else behind a word ("Score: 7"), alone on a
    line, or at the beginning of a sentence that begins the answer; or else the last number. "7,5" is 7.5. Not searched
    are the judge's reasoning, and where it repeats its scale: "from 0 to 10", "0-10", "10 is the best"."""
    lowest: float = 0.0
    """The score that becomes reward 0."""
    highest: float = 10.0
    """The score that becomes reward 1."""
    options: Mapping[str, object] = field(default_factory=lambda: {"temperature": 0.0, "max_tokens": 16})
    """Further fields of the request, by OpenAI's names."""
    max_concurrent: PositiveInt = 16
    """Most requests at a time. Others wait, which does not count towards `time_limit_s`."""
    max_retries: NonNegativeInt = 4
    """How often a request is made again after 408, 409, 429, 5xx, a lost connection or a time-out, with growing pauses
    or the pauses that the server asks for."""
    request_timeout_s: Positive = 60.0
    """Most seconds for one request."""
    time_limit_s: Positive = 180.0
    """Most seconds for one judgement with all its retries."""
    failure_reward: float | None = None
    """The reward where the judge fails or says nothing that holds a score. None leaves the rollout out of the batch;
    it then counts in `env_failures`. An episode that runs out of context, which is not judged, has this reward or 0."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        if not self.lowest < self.highest:
            raise ValueError(f"Judge.highest is {self.highest}; it must be above Judge.lowest, {self.lowest}")

    def check(self) -> None:
        """Raises ValueError if the environment variable of the key is not set."""
        if self.api_key_variable and not os.environ.get(self.api_key_variable):
            raise ValueError(
                f"Judge.api_key_variable is {self.api_key_variable!r}, and no such environment variable is set"
            )

    async def rate(self, prompt: Prompt, turns: Sequence[Mapping[str, str]]) -> Judgement:
        """See `AnyJudge`."""
        names = {
            "{prompt}": prompt_text(prompt),
            "{answer}": prompt_text(turns),
            "{lowest}": f"{self.lowest:g}",
            "{highest}": f"{self.highest:g}",
        }
        # All names at once: the model's answer may contain one of them.
        question = re.sub("|".join(map(re.escape, names)), lambda match: names[match[0]], self.template)
        judgement = await _ask(self, question)
        if judgement.finish_reason not in _COMPLETE:
            why = "was cut off; raise max_tokens in Judge.options"
            if judgement.finish_reason != "length":
                why = f"is not complete: its server says {judgement.finish_reason!r}"
            return replace(judgement, problem=f"its answer {judgement.said!r:.80} {why}")
        try:
            return replace(judgement, reward=score_of(self, judgement.said))
        except ValueError as error:
            return replace(judgement, problem=f"{error}")


@configuration
class JudgedEnv:
    """An environment whose rewards a judge gives. Its own reward becomes `own_reward` in the metrics.

    Further metrics, each a mean over rollouts: `judge_prompt_tokens` and `judge_completion_tokens`, as the server
    counted them, `judge_retries`, and `judge_failures` (with `failure_reward` only).
    """

    env: Environment
    judge: AsItIs[AnyJudge]

    def __post_init__(self) -> None:
        """Raises ValueError for what is no judge."""
        if not callable(getattr(self.judge, "rate", None)):
            raise ValueError(f"JudgedEnv.judge is {self.judge!r:.200}; it must be a Judge or a RewardModel")

    @property
    def name(self) -> str:
        """The environment's name, and the judge's."""
        return f"{self.env.name}, judged by {self.judge.model}"

    @property
    def stop(self) -> tuple[str, ...]:
        """The environment's stop strings."""
        return self.env.stop

    @property
    def call_time_limit_s(self) -> float:
        """See `rl.protocols.Env`. The judge and the environment have their own, shorter limits."""
        return DEFAULT_TIME_LIMIT_S + self.judge.time_limit_s + time_limit_of(self.env)

    def train_problems(self, seed: int, start: int, count: int) -> list["JudgedProblem"]:
        """The environment's training problems, judged."""
        return self._judged(self.env.train_problems(seed, start, count))

    def eval_problems(self, count: int) -> list["JudgedProblem"]:
        """The environment's held-out problems, judged. Raises ValueError if the judge does not work."""
        self.judge.check()
        return self._judged(self.env.eval_problems(count))

    def _judged(self, problems: Sequence[Problem]) -> list["JudgedProblem"]:
        limit = time_limit_of(self.env)
        return [JudgedProblem(problem=problem, judge=self.judge, time_limit_s=limit) for problem in problems]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedProblem(AroundProblem):
    """A problem of the environment."""

    problem: Problem
    judge: AnyJudge
    time_limit_s: float

    @property
    def id(self) -> str:
        """The problem's id."""
        return self.problem.id

    @property
    def prompt(self) -> Prompt:
        """The problem's prompt."""
        return self.problem.prompt

    @property
    def tools(self) -> Sequence[Mapping[str, object]]:
        """The problem's tools, if it has any."""
        return given(ProblemOptions, self.problem).tools

    async def start(self) -> "JudgedEpisode":
        """Starts the environment's own episode."""
        episode = await call_environment(self.problem.start, time_limit_s=self.time_limit_s)
        return JudgedEpisode(self, episode)


class JudgedEpisode:
    """An episode of the environment, judged at its end."""

    def __init__(self, problem: JudgedProblem, episode: Episode) -> None:
        """`episode` has just been started."""
        self._problem = problem
        self._episode = episode
        self._turns: list[Mapping[str, str]] = []

    async def reply(self, completion: str) -> Reply:
        """The environment's reply; at the end of the episode, the judge's reward with the environment's metrics.

        An observation has `failure_reward`, or else 0: an episode that runs out of context is not judged, and the
        environment's own reward is on another scale.
        Raises RuntimeError if the judge fails and there is no `failure_reward`.
        """
        reply = await call_environment(self._episode.reply, completion, time_limit_s=self._problem.time_limit_s)
        self._turns.append({"role": "assistant", "content": Answer.read(completion).content})
        if not isinstance(reply, Done):
            said = reply.messages
            self._turns += [{"role": "user", "content": said}] if isinstance(said, str) else said
            return replace(reply, reward=self._problem.judge.failure_reward or 0.0)
        judgement = await _judge(self._problem.judge, self._problem.prompt, self._turns)
        return Done(
            reward=judgement.reward,
            metrics={
                **reply.metrics,
                "own_reward": float(reply.reward),
                "judge_prompt_tokens": float(judgement.num_prompt_tokens),
                "judge_completion_tokens": float(judgement.num_completion_tokens),
                "judge_retries": float(judgement.num_retries),
                "judge_failures": float(bool(judgement.problem)),
            },
        )


async def _judge(judge: AnyJudge, prompt: Prompt, turns: Sequence[Mapping[str, str]]) -> Judgement:
    """The judgement of one conversation. Raises RuntimeError if the judge fails and there is no `failure_reward`."""
    try:
        judgement, cause = await judge.rate(prompt, turns), None
    except Exception as error:  # of the network or the server
        problem = "it took too long" if isinstance(error, TimeoutError) else f"{error}".strip() or type(error).__name__
        judgement, cause = Judgement(problem=problem), error
    if judgement.problem and judge.failure_reward is None:
        raise RuntimeError(f"the judge {judge.model!r} failed: {judgement.problem:.300}") from cause
    return replace(judgement, reward=judge.failure_reward or 0.0) if judgement.problem else judgement


def score_of(judge: Judge, said: str) -> float:
    """The score on the scale of rewards. Raises ValueError for an answer without a score, and for one off the scale."""
    low, high = (rf"{re.escape(f'{end:g}')}(?:[.,]0+)?" for end in (judge.lowest, judge.highest))
    scale = rf"(?<![\d.]){low} *(?:to|and|through|-|\u2013) *{high}(?![\d.]*\d)|[\[(]{low}[,;] ?{high}[\])]"
    one_end = rf"(?<![\d.])(?:{low}|{high}) *(?:=|(?:is|means|being)\b)"
    text = re.sub(scale, " ", Answer.read(said).content.translate(_MINUS))
    patterns = [judge.score_pattern] if judge.score_pattern else [pattern.format(end=high) for pattern in _SCORES]
    # "10 is my score" explains no scale: nothing else is there.
    texts = (re.sub(one_end, " ", text), text)
    found = next(filter(None, ([*re.finditer(each, read)] for read in texts for each in patterns)), None)
    if found is None:
        raise ValueError(f"its answer {said!r:.80} holds no score")
    words = found[-1][1] if found[-1].re.groups else found[-1][0]
    thousands = judge.highest >= 1000 and re.fullmatch(r"-?\d{1,3},\d{3}", words)
    score = float(words.replace(",", "" if thousands else "."))
    if not judge.lowest <= score <= judge.highest:
        raise ValueError(f"its score {score:g} is not between {judge.lowest:g} and {judge.highest:g}")
    return (score - judge.lowest) / (judge.highest - judge.lowest)


async def _ask(judge: Judge, question: str) -> Judgement:
    """What the judge says, not yet read."""
    client, turns = _connection(judge)
    with waiting():
        await turns.acquire()
    try:
        async with asyncio.timeout(judge.time_limit_s):
            raw = await client.chat.completions.with_raw_response.create(
                model=judge.model, messages=[{"role": "user", "content": question}], **judge.options
            )
            answer = raw.parse()
    finally:
        turns.release()
    return Judgement(
        said=answer.choices[0].message.content or "",
        finish_reason=answer.choices[0].finish_reason,
        num_prompt_tokens=(answer.usage and answer.usage.prompt_tokens) or 0,
        num_completion_tokens=(answer.usage and answer.usage.completion_tokens) or 0,
        num_retries=raw.retries_taken,
    )


_connections: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, tuple[Any, asyncio.Semaphore]]] = (
    WeakKeyDictionary()
)


def _connection(judge: Judge) -> tuple[Any, asyncio.Semaphore]:
    """The client and the turns of this judge, shared by all episodes of an event loop."""
    mine = _connections.setdefault(asyncio.get_running_loop(), {})
    if repr(judge) not in mine:
        mine[repr(judge)] = _client_of(judge), asyncio.Semaphore(judge.max_concurrent)
    return mine[repr(judge)]


def _client_of(judge: Judge) -> Any:
    key = os.environ.get(judge.api_key_variable, "") if judge.api_key_variable else ""
    return _openai().AsyncOpenAI(
        base_url=judge.base_url,
        api_key=key or "none",
        max_retries=judge.max_retries,
        timeout=judge.request_timeout_s,
    )


@functools.cache
def _openai() -> Any:
    import openai  # importing it takes a second, which `--help` should not

    return openai
