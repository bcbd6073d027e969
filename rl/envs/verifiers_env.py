"""Environments of the `verifiers` package, with their own rubrics: https://github.com/PrimeIntellect-ai/verifiers.

    pip install "ownloop[verifiers]"          version 0.1.14, whose environments are loaded with `load_environment`

    VerifiersEnv(environment="wordle")        an installed environment, or any module with `load_environment(**args)`

The environment runs its own rollout and asks a client for the model's messages; that client is the one here, which
passes on what ownloop's generator sampled. Environments whose rewards compare rollouts, and those with tools in the
model's own call format, are refused.
"""

import asyncio
import contextlib
import functools
import importlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.envs.procedural import is_eval
from rl.envs.rows import content_id, epochs
from rl.protocols import Done, Observation, Reply

_Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersEnv:
    """One environment of `verifiers`. What it calls its evaluation data is held out, or else a tenth of its data."""

    environment: str
    """What `verifiers.load_environment` takes: the name of an installed environment."""
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The environment's own options."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer."""

    def __post_init__(self) -> None:
        """Raises ValueError for an environment that cannot be loaded, or is of a kind that is not supported."""
        loaded = self._load()
        if loaded.requires_group_rollouts:
            raise ValueError(f"{self._which} compares rollouts of a group in its rewards, which is not supported")
        if loaded.tool_defs:
            raise ValueError(
                f"{self._which} has tools in the model's own call format ({len(loaded.tool_defs)} of them), which is "
                "not supported; rl.envs.python_arithmetic shows a tool that the model calls in plain text"
            )
        train, eval_data = self._split()
        if not train or not eval_data:
            raise ValueError(f"{self._which} has {len(train)} training and {len(eval_data)} held-out rows; needs both")

    @property
    def name(self) -> str:
        """The environment's name."""
        return self.environment

    def train_problems(self, seed: int, start: int, count: int) -> list["VerifiersProblem"]:
        """Every row once in an order that seed and epoch decide, then all of them in the next order."""
        return [self._problem(row) for row in epochs(self._split()[0], seed, start, count)]

    def eval_problems(self, count: int) -> list["VerifiersProblem"]:
        """The first held-out rows. Raises ValueError when there are fewer."""
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
            return _load(self.environment, tuple(sorted(self.args.items())))
        except Exception as error:  # whatever its module and its data are like
            raise ValueError(f"{self._which} cannot be loaded: {error}") from error

    def _split(self) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
        return _rows(self._load())


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersProblem:
    """A row of the environment's data."""

    id: str
    prompt: _Messages
    row: Mapping[str, Any]
    environment: Any

    async def start(self) -> "VerifiersEpisode":
        """Starts the environment's own rollout, which waits for what the model says."""
        return VerifiersEpisode(self)


class VerifiersEpisode:
    """One rollout of the environment. It runs in a task, which ends when nobody has the episode any more."""

    def __init__(self, problem: VerifiersProblem) -> None:
        """Runs on the event loop."""
        self._client = _client_class()(None)
        self._said: _Messages = list(problem.prompt)
        self._started = False
        rollout = problem.environment.run_rollout(dict(problem.row), self._client, "policy", {})
        self._rollout: asyncio.Task[Any] = asyncio.create_task(rollout)
        weakref.finalize(self, _cancel, asyncio.get_running_loop(), self._rollout)

    async def reply(self, completion: str) -> Reply:
        """What the environment adds to the conversation, or its rubric's verdict. Raises what the environment raised,
        and RuntimeError when it does not go on from where the conversation was."""
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
        """The conversation that the environment asks the model to go on with; None when it is over."""
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
    """A class, because the package is only imported where it is used."""
    types: Any = importlib.import_module("verifiers.types")
    base: Any = importlib.import_module("verifiers.clients").Client

    class PolicyClient(base):
        """Passes prompts out and answers in."""

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
            """A text is never an error."""

        async def from_native_response(self, response: str) -> Any:
            message = types.ResponseMessage(content=response, finish_reason="stop", is_truncated=False)
            return types.Response(id="", created=0, model="policy", message=message)

        async def close(self) -> None:
            """There is nothing to close."""

    return PolicyClient


def _plain(messages: Any) -> _Messages:
    """As dictionaries of text. Raises ValueError for images, and for what a tool was called with."""
    pairs = [(m["role"], m["content"]) if isinstance(m, dict) else (m.role, m.content) for m in messages]
    for role, content in pairs:
        if not isinstance(content, str):
            raise ValueError(f"a message of role {role} is no text but {content!r:.80}")
    return [{"role": role, "content": content} for role, content in pairs]


def _cancel(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[Any]") -> None:
    with contextlib.suppress(RuntimeError):  # the loop has been closed
        loop.call_soon_threadsafe(task.cancel)


def _id(row: Mapping[str, Any]) -> str:
    return content_id([_plain(row["prompt"]), row.get("answer"), row.get("info")])


@functools.lru_cache(maxsize=8)
def _load(environment: str, args: tuple[tuple[str, Any], ...]) -> Any:
    try:
        verifiers: Any = importlib.import_module("verifiers")
    except ImportError:
        raise ImportError('the package is not there; install it with pip install "ownloop[verifiers]"') from None
    return verifiers.load_environment(environment, **dict(args))


@functools.lru_cache(maxsize=8)
def _rows(environment: Any) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Training and held-out rows; no prompt is in both."""
    environment.build_eval_dataset()
    if environment.eval_dataset is None:
        rows = _distinct(environment.get_dataset())
        held = [is_eval(content_id(_plain(row["prompt"]))) for row in rows]
        return [r for r, h in zip(rows, held, strict=True) if not h], [r for r, h in zip(rows, held, strict=True) if h]
    eval_data = _distinct(environment.get_eval_dataset())
    prompts = {content_id(_plain(row["prompt"])) for row in eval_data}
    train = [row for row in _distinct(environment.get_dataset()) if content_id(_plain(row["prompt"])) not in prompts]
    return train, eval_data


def _distinct(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return list({_id(row): row for row in rows}.values())
