"""`ownloop chat`, with a generator that repeats what it read."""

import asyncio
import io
import sys
from pathlib import Path
from typing import Any

import pytest

from controller.commands.chat_and_eval import Chat, converse
from controller.commands.cli import main
from rl.rollouts.rendering import Renderer
from rl.tiny_models import tiny_llama
from rl.types import SamplingParams
from tests.controller.commands.finished_runs import in_this_process
from tests.docs.in_process import tiny_chat_model
from tests.rl.fakes import ScriptedGenerator


def talk(
    model: Path, text: str, monkeypatch: pytest.MonkeyPatch, max_model_len: int = 32, **options: Any
) -> tuple[ScriptedGenerator, list[str], list[str]]:
    """The generator, the lines on the terminal, and what the user was told besides."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    generator = ScriptedGenerator(lambda prompt, sample, seed: " ".join(f"w{token}" for token in prompt))
    terminal, told = io.StringIO(), list[str]()
    command = Chat(model=str(model), max_tokens=5, temperature=0.5, **options)
    asyncio.run(converse(generator, Renderer(model, max_model_len), command, told.append, terminal))
    return generator, terminal.getvalue().splitlines(), told


def test_a_conversation_is_remembered_until_an_empty_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_chat_model(tmp_path / "model")
    generator, lines, _ = talk(model, "w5 w6\nw7\n\nw8\n", monkeypatch)
    assert lines == ["w5 w6", "w5 w6 w5 w6 w7", "w8"]
    assert generator.calls[0][1] == SamplingParams(max_tokens=5, temperature=0.5)
    _, lines, _ = talk(model, "w5\n", monkeypatch, system="w9")
    assert lines == ["w9 w5"]


def test_a_conversation_that_is_too_long_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_chat_model(tmp_path / "model")
    generator, lines, told = talk(model, "w7 w8 w3\nw4 w5\nw6\n", monkeypatch, max_model_len=7)
    assert lines == ["w7 w8 w3", "w6"]
    assert told == ["the conversation is longer than the context; a new one begins"]
    assert [sampling.max_tokens for _, sampling, _ in generator.calls] == [4, 5]


def test_a_model_without_a_chat_template_continues_each_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(tmp_path / "model")
    _, lines, told = talk(model, "w5\nw6\n", monkeypatch)
    assert lines == ["w5", "w6"]
    assert told == ["the model has no chat template: it continues each line as it stands"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    in_this_process(monkeypatch, tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5\n"))
    with pytest.raises(SystemExit) as stop:
        main(["chat", "smollm2-135m-instruct", "--max-tokens", "3", "--num-threads", "2"])
    output = capfd.readouterr()
    assert stop.value.code == 0, output.err
    assert len(output.out.split()) <= 3
    assert output.err.splitlines()[-1] == "an empty line begins a new conversation, Ctrl-D ends"
