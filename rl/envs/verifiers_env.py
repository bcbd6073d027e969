"""Environments of the `verifiers` package, with their own rubrics: https://github.com/PrimeIntellect-ai/verifiers.

The extra `verifiers` has version 0.1.14 of the package, whose environments are loaded with `load_environment`.

    VerifiersEnv(environment="wordle")        an installed environment, or any module with `load_environment(**args)`

A verifiers environment runs its own rollout and asks a client for the model's messages. The client in this file answers
with what ownloop's generator sampled. Two kinds of environments are refused: those whose rewards compare the rollouts
of a group, and those with tools in the model's own call format.
"""

import asyncio
import contextlib
import functools
import importlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.checks import how_to_install
from rl.data.rows import content_id, python_order, split, stream
from rl.envs.procedural import Options
from rl.protocols import Done, Observation, Reply

_Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersEnv:
    """One environment of `verifiers`. Its evaluation data are held out; if it has none, a tenth of its data is."""

    environment: str
    """Name of an installed environment, as `verifiers.load_environment` takes it."""
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The environment's own options, by its names."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer."""

    def __post_init__(self) -> None:
        """Raises ValueError if the environment cannot be loaded or is of an unsupported kind."""
        loaded = self._load()
        if loaded.requires_group_rollouts:
            raise ValueError(f"{self._which} has rewards that compare the rollouts of a group, which is not supported")
        if loaded.tool_defs:
            raise ValueError(
                f"{self._which} has tools in the model's own call format ({len(loaded.tool_defs)} of them), which is "
                "not supported; rl.envs.tools has the model call functions of yours in that format"
            )
        train_rows, eval_rows = self._split()
        if not train_rows or not eval_rows:
            raise ValueError(
                f"{self._which} has {len(train_rows)} training and {len(eval_rows)} held-out rows; both are needed"
            )

    @property
    def name(self) -> str:
        """The environment's name."""
        return self.environment

    def train_problems(self, seed: int, start: int, count: int) -> list["VerifiersProblem"]:
        """See `rl.protocols.Env`. Every epoch has every row once, in an order of its own."""
        return [self._problem(row) for row in stream(self._split()[0], python_order, seed, start, count)]

    def eval_problems(self, count: int) -> list["VerifiersProblem"]:
        """The first held-out rows. Raises ValueError if there are fewer."""
        _, rows = self._split()
        if count > len(rows):
            raise ValueError(f"num_eval is {count}, but {self._which} has only {len(rows)} held-out rows")
        return [self._problem(row) for row in rows[:count]]

    @property
    def _which(self) -> str:
        return f"VerifiersEnv.environment {self.environment!r}"

    def _problem(self, row: Mapping[str, Any]) -> "VerifiersProblem":
        return VerifiersProblem(id=_id(row), prompt=_plain(row["prompt"]), row=row, environment=self._load())

    def _load(self) -> Any:
        try:
            return _load(self.environment, Options(self.args))
        except Exception as error:  # its module may raise anything
            raise ValueError(f"{self._which} cannot be loaded: {error}") from error

    def _split(self) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
        return _rows(self._load())


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersProblem:
    """A row of the environment's data as a problem."""

    id: str
    prompt: _Messages
    row: Mapping[str, Any]
    environment: Any

    async def start(self) -> "VerifiersEpisode":
        """Starts the environment's own rollout, which then waits for the model's first message."""
        return VerifiersEpisode(self)


class VerifiersEpisode:
    """One rollout of the environment, in a task that is cancelled when the episode is garbage-collected."""

    def __init__(self, problem: VerifiersProblem) -> None:
        """Starts the task. Must be called on the event loop."""
        self._client = _client_class()(None)
        self._said: _Messages = list(problem.prompt)
        self._started = False
        rollout = problem.environment.run_rollout(dict(problem.row), self._client, "policy", {})
        self._rollout: asyncio.Task[Any] = asyncio.create_task(rollout)
        # An episode may be abandoned (full context, cancelled rollout), and nothing else would end its task.
        weakref.finalize(self, _cancel, asyncio.get_running_loop(), self._rollout)

    async def reply(self, completion: str) -> Reply:
        """The messages that the environment adds to the conversation, or its reward at the end.

        Raises what the environment raised, and RuntimeError if it changes the conversation so far.
        """
        if not self._started:
            self._started = True
            prompt = await self._next_prompt()
            if prompt is None:
                return self._done(self._rollout.result())
            if prompt != self._said:
                raise RuntimeError("the environment does not begin with the prompt of its row, which is not supported")
        self._client.answer(completion)
        self._said.append({"role": "assistant", "content": completion})
        prompt = await self._next_prompt()
        if prompt is None:
            return self._done(self._rollout.result())
        num_said = len(self._said)
        if prompt[:num_said] != self._said or len(prompt) == num_said:
            raise RuntimeError("the environment rewrites its conversation instead of adding to it: not supported")
        self._said = prompt
        return Observation(messages=prompt[num_said:])

    async def _next_prompt(self) -> _Messages | None:
        """The conversation that the environment wants the model to continue; None at the end of the rollout."""
        asked = asyncio.ensure_future(self._client.next_prompt())
        await asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return _plain(asked.result())
        asked.cancel()
        return None

    def _done(self, output: Mapping[str, Any]) -> Done:
        error = output["error"]
        if error:
            raise RuntimeError(error["error_chain_repr"] if isinstance(error, dict) else repr(error))
        return Done(reward=output["reward"], metrics=output["metrics"] or {})


@functools.cache
def _client_class() -> Any:
    """The client's class. It is made in a function because its base class comes from an optional package."""
    types: Any = importlib.import_module("verifiers.types")
    base: Any = importlib.import_module("verifiers.clients").Client

    class PolicyClient(base):
        """A client of two queues: prompts of the environment, and answers of the model."""

        def __init__(self, client: Any) -> None:
            super().__init__(client)
            self._prompts: asyncio.Queue[Any] = asyncio.Queue()
            self._answers: asyncio.Queue[str] = asyncio.Queue()

        async def next_prompt(self) -> Any:
            return await self._prompts.get()

        def answer(self, text: str) -> None:
            self._answers.put_nowait(text)

        def setup_client(self, config: Any) -> Any:
            return config

        async def to_native_tool(self, tool: Any) -> Any:
            raise RuntimeError(f"the environment offers the tool {tool.name}; native tool calls are not supported")

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def get_native_response(self, prompt: Any, *_arguments: Any, **_options: Any) -> str:
            self._prompts.put_nowait(prompt)
            return await self._answers.get()

        async def raise_from_native_response(self, response: str) -> None:
            """Does nothing: a text is never an error."""

        async def from_native_response(self, response: str) -> Any:
            message = types.ResponseMessage(content=response, finish_reason="stop", is_truncated=False)
            return types.Response(id="", created=0, model="policy", message=message)

        async def close(self) -> None:
            """Does nothing: there is no connection."""

    return PolicyClient


def _plain(messages: Any) -> _Messages:
    """Messages as dictionaries of text. Raises ValueError for other content, such as images or tool calls."""
    pairs = [(m["role"], m["content"]) if isinstance(m, dict) else (m.role, m.content) for m in messages]
    for role, content in pairs:
        if not isinstance(content, str):
            raise ValueError(f"a message of role {role!r} has content {content!r:.80}; text is needed")
    return [{"role": role, "content": content} for role, content in pairs]


def _cancel(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[Any]") -> None:
    with contextlib.suppress(RuntimeError):  # the loop has been closed
        loop.call_soon_threadsafe(task.cancel)


def _id(row: Mapping[str, Any]) -> str:
    return content_id([_plain(row["prompt"]), row.get("answer"), row.get("info")])


@functools.lru_cache(maxsize=8)
def _load(environment: str, args: Options) -> Any:
    try:
        verifiers: Any = importlib.import_module("verifiers")
    except ImportError:
        raise ImportError(f"the package is not there; install it with {how_to_install('verifiers')}") from None
    return verifiers.load_environment(environment, **args)


@functools.lru_cache(maxsize=8)
def _rows(environment: Any) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Training and held-out rows. No prompt is in both."""
    environment.build_eval_dataset()
    if environment.eval_dataset is None:
        return split(_distinct(environment.get_dataset()), _prompt_id)
    eval_rows = _distinct(environment.get_eval_dataset())
    eval_prompts = {_prompt_id(row) for row in eval_rows}
    train_rows = [row for row in _distinct(environment.get_dataset()) if _prompt_id(row) not in eval_prompts]
    return train_rows, eval_rows


def _prompt_id(row: Mapping[str, Any]) -> str:
    return content_id(_plain(row["prompt"]))


def _distinct(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return list({_id(row): row for row in rows}.values())
