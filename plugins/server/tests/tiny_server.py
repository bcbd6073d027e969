"""`ownloop serve` of a tiny model with a real trainer and a real generator, in a thread of the test's own process."""

import asyncio
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("tinker", reason="the package tinker, of the extra tinker, is not installed")

from generator.config import GeneratorConfig
from ownloop_server.config import ServeConfig
from ownloop_server.serving import serve
from rl.tiny_models import SERVABLE, tiny_llama
from tests.waiting import LIMIT_S, join
from trainer.config import TrainerConfig

TOOL_CALL = {
    59: "<tool_call>",
    60: '{"name": "w7",',
    61: '"arguments": {"a": 1,',
    62: '"b": 2}}',
    63: "</tool_call>",
}
"""The text of the last tokens, which together call the function w7."""
_CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.content or '' }} {% endfor %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a test sees of the server."""

    url: str
    folder: Path
    model: Path


def _tiny_chat_model(path: Path) -> Path:
    model = tiny_llama(path, **SERVABLE)
    (model / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {
        TOOL_CALL.get(token, word): token for word, token in tokenizer["model"]["vocab"].items()
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    return model


@contextmanager
def serving_tiny_model(folder: Path, *, max_snapshots: int = 4) -> Generator[Served]:
    """Serves it as "tiny" until the block ends. Everything lies in `folder`."""
    model = _tiny_chat_model(folder / "model")
    config = ServeConfig(
        model=(str(model),),
        names=("tiny",),
        port=0,
        folder=folder / "gateway",
        max_rank=8,
        max_snapshots=max_snapshots,
        tool_parser=("hermes",),
        trainer=TrainerConfig(compute_dtype="float32"),
        generator=GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=8),
    )
    said: list[str] = []
    serving, ready = threading.Event(), threading.Event()
    loop = asyncio.new_event_loop()
    task: list[asyncio.Task[None]] = []
    errors: list[BaseException] = []

    def say(text: str) -> None:
        said.append(text)
        if "TINKER_BASE_URL=" in text:
            serving.set()
            ready.set()

    def run() -> None:
        (folder / "gateway" / "logs").mkdir(parents=True)
        task.append(loop.create_task(serve(config, {str(model): model}, say)))
        try:
            loop.run_until_complete(task[0])
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            errors.append(error)
        ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(LIMIT_S), f"waited {LIMIT_S:g} s in vain for the server; it said {said}"
        assert serving.is_set(), errors
        url = next(text for text in said if "TINKER" in text).partition("TINKER_BASE_URL=")[2].split()[0]
        yield Served(url=url, folder=config.folder, model=model)
    finally:
        loop.call_soon_threadsafe(task[0].cancel)
        join(thread)
    assert not errors
