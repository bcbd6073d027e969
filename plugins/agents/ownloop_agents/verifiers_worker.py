"""Plays episodes of one verifiers 0.4 environment. It runs in verifiers' own Python, and imports nothing of ownloop.

    PYTHON verifiers_worker.py SOCKET CONFIG

A connection to the Unix socket is one request: a line of JSON, answered by a line of JSON. `{"tasks": N}` asks for the
first N tasks. `{"index": i, "base_url": ..., "key": ...}` is an episode of task i; closing the connection cancels it.
The worker ends when its standard input is closed, so it does not outlive its parent.
"""

import asyncio
import contextlib
import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any


class ServedEnvironment:
    """One environment and the tasks that were read from it so far."""

    def __init__(self, config: dict[str, object]) -> None:
        """Raises what verifiers raises for a configuration that it does not accept."""
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        self._clients = importlib.import_module("verifiers.v1.clients")
        self.env = loaders.load_environment(loaders.resolve_env_config(config))
        agents = importlib.import_module("verifiers.v1.configs.agent").agent_config_fields(self.env.config)
        for name, part in {"the environment": self.env.config, **agents}.items():
            # a retried attempt would be several sessions under one key
            if part.retries.max_retries or part.retries.rules:
                raise ValueError(f"{name} has retries; an attempt is one session, so leave retries.max_retries at 0")
        self._unread = iter(self.env.taskset)
        self._tasks: list[Any] = []

    def tasks(self, count: int) -> list[dict[str, str]]:
        """The first tasks. An endless taskset is read no further."""
        # in the taskset's own order, so that an index means one task
        self._tasks += itertools.islice(self._unread, max(0, count - len(self._tasks)))
        return [{"id": task.key, "prompt": _text(task.data.prompt)} for task in self._tasks[:count]]

    async def play(self, index: int, base_url: str, key: str) -> dict[str, object]:
        """An episode of a task, whose model is at `base_url`. Each agent's requests name `key` and its number."""
        clients, numbers = self._clients, itertools.count()
        self.tasks(index + 1)

        def name(trace: Any) -> None:
            # verifiers sends the id of a trace as X-Session-ID. With the key in `base_url`, every episode would have an
            # HTTP client of its own, which verifiers keeps until the end.
            trace.id = f"{key}.{next(numbers)}"  # `AgentEndpoint` finds the session by the part before the dot

        client = clients.EvalClientConfig(base_url=base_url, api_key_var="OWNLOOP_NO_KEY")
        context = clients.ModelContext(model="policy", client=client)
        (slot,) = self.env.slots(self._tasks[index])  # an episode has one slot here
        episode = await self.env.run_slot(slot, context, on_trace=name)
        return _outcome(episode)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one connection."""
        request = json.loads(await reader.readline())
        work = asyncio.create_task(self._do(request))
        gone = asyncio.create_task(reader.read())  # which returns when the other side closes
        # a program that is killed takes its episode with it
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            writer.write(json.dumps(await work).encode() + b"\n")
            await writer.drain()
        gone.cancel()
        writer.close()

    async def _do(self, request: dict[str, Any]) -> object:
        try:
            return self.tasks(request["tasks"]) if "tasks" in request else await self.play(**request)
        except Exception as error:  # of the environment
            return {"error": f"{type(error).__name__}: {error}"}


def _outcome(episode: Any) -> dict[str, object]:
    """The mean reward of the episode's traces, or its error."""
    traces = episode.traces
    errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
    if not episode.ok:  # the last error is the one that ended it
        return {"error": f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode did not end well"}
    # its tokens would be trained as if they were the policy's
    fixed = [trace.agent.name for trace in traces if not trace.agent.trainable and trace.calls]
    if fixed:
        return {
            "error": f"its agent {fixed[0]!r} is not to be trained and asks the policy; give it a client of its own"
        }
    values: dict[str, list[float]] = {}
    for trace in traces:
        scores = {name: None if reward is None else reward.score for name, reward in trace.rewards.items()}
        for name, value in {**trace.metrics, **scores}.items():
            # a metric that a trace lacks does not count as 0
            values.setdefault(name, []).extend(() if value is None else (value,))
    return {
        "reward": sum(trace.reward for trace in traces) / len(traces),
        "metrics": {name: sum(found) / len(found) for name, found in values.items() if found},
        "truncated": any(trace.is_truncated for trace in traces),
    }


def _text(prompt: Any) -> str:
    """A prompt in words: text, messages, or none if the user opens the conversation."""
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    return "\n".join(message.content for message in prompt if isinstance(message.content, str))


async def main() -> None:
    """Serves until standard input is closed."""
    path, config = sys.argv[1:]
    worker = ServedEnvironment(json.loads(config))
    async with worker.env.serving():
        server = await asyncio.start_unix_server(worker.answer, f"{path}.new")
        Path(f"{path}.new").rename(path)  # a path that exists can be connected to
        await asyncio.to_thread(sys.stdin.buffer.read)  # closed when the owner ends, however it ends
        server.close()


if __name__ == "__main__":
    asyncio.run(main())
