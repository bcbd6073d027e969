"""The tokenizer is the one that `AutoTokenizer` loads, and most of transformers stays out of the process."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from rl.rollouts.rendering import Renderer
from rl.rollouts.tokenizer import load_tokenizer, said_tokens, text_of
from rl.tiny_models import tiny_llama, tiny_qwen3
from tests.waiting import LIMIT_S
from trainer.engines.hf.transformers_policy import TransformersPolicy


@pytest.mark.parametrize("tokenizer_class", ["TokenizersBackend", "PreTrainedTokenizerFast", "GPT2Tokenizer", None])
@pytest.mark.parametrize("write", [tiny_llama, tiny_qwen3])
def test_it_is_what_auto_tokenizer_loads(tmp_path: Path, write: Any, tokenizer_class: str | None) -> None:
    """Whatever class a directory names."""
    model = write(tmp_path / "model")
    file = model / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"tokenizer_class": tokenizer_class, "chat_template": "{{ messages }}"}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    ours, theirs = load_tokenizer(model), AutoTokenizer.from_pretrained(model)
    assert type(ours) is type(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template == "{{ messages }}"
    assert ours.encode("w5 w7 w9 unknown") == theirs.encode("w5 w7 w9 unknown")


@pytest.mark.stranger("2.A11")
@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_code_of_a_folder_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    model = tiny_llama(tmp_path / "model")
    (model / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Theirs: pass\n")
    config = json.loads((model / file).read_text()) | {"tokenizer_class": "Theirs", "model_type": "theirs"}
    auto = {"AutoTokenizer": ["theirs.Theirs", "theirs.Theirs"], "AutoConfig": "theirs.Theirs"}
    (model / file).write_text(json.dumps({**config, "auto_map": auto}))
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": asked.append(question) or "y")
    with pytest.raises(ValueError, match="code"):
        load_tokenizer(model) if file == "tokenizer_config.json" else TransformersPolicy(model, "lm", torch.float32)
    assert (asked, (tmp_path / "ran").exists()) == ([], False)


@pytest.mark.stranger("2.A11")
def test_nothing_that_loads_a_folder_may_run_its_code() -> None:
    root = Path(__file__).parents[3]
    parts = [root / "controller", root / "generator", root / "rl", root / "trainer", *root.glob("plugins/*/ownloop_*")]
    calls = [
        node
        for part in parts
        for file in part.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and re.search(r"Auto\w+\.from_\w+$", ast.unparse(node.func))
    ]
    assert len(calls) >= 5
    for call in calls:
        assert "trust_remote_code=False" in ast.unparse(call) or "**_options(" in ast.unparse(call)


@pytest.mark.stranger("2.E5")
@pytest.mark.parametrize(("text", "is_media"), [("w64", False), ("<|im_start|>", False), ("<image>", True)])
def test_a_tokenizer_with_tokens_that_the_model_lacks_is_refused(tmp_path: Path, text: str, is_media: bool) -> None:
    model = tiny_llama(tmp_path / "model")
    tokenizer = load_tokenizer(model)
    tokenizer.add_tokens([text], special_tokens=text != "w64")
    tokenizer.save_pretrained(model)
    if is_media:
        file = model / "tokenizer_config.json"
        media = {"extra_special_tokens": {"image_token": text}}
        file.write_text(json.dumps({**json.loads(file.read_text()), **media}))
        Renderer(model)
    else:
        with pytest.raises(ValueError, match=re.escape(f"such as {text!r}, number 64; config.json says vocab_size 64")):
            Renderer(model)


SAID = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|channel|>", "<|message|>", "<box>")
BORDERS = ("<turn>", "<end>")
TEMPLATE = (
    "{% for m in messages %}<turn>{{ m.role }} {{ m.content }} <end>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant <think>{% endif %}"
)


@pytest.mark.stranger("C4")
@pytest.mark.parametrize("template", [TEMPLATE, "{{ raise_exception('no') }}", None])
def test_special_tokens_that_say_something_are_text(tmp_path: Path, template: str | None) -> None:
    tokenizer = load_tokenizer(tiny_llama(tmp_path / "model"))
    tokenizer.add_special_tokens({"additional_special_tokens": [*SAID, *BORDERS]})
    tokenizer.chat_template = template
    said, borders = (tokenizer.convert_tokens_to_ids([*texts]) for texts in (SAID, BORDERS))
    assert said_tokens(tokenizer) == {*said, *(borders if template != TEMPLATE else ())}
    (word,) = tokenizer.encode("w5", add_special_tokens=False)
    for token, text in zip(said, SAID, strict=True):
        shown = text_of(tokenizer, [tokenizer.eos_token_id, token, word])
        assert shown.replace(" ", "") == text + "w5"
    if template == TEMPLATE:
        assert text_of(tokenizer, [*borders, word, tokenizer.eos_token_id]) == "w5"


@pytest.mark.seconds
def test_what_no_tokenizer_needs_is_not_imported(tmp_path: Path) -> None:
    """A run's first token waits for this import."""
    model = tiny_llama(tmp_path / "model")
    code = (
        "import pathlib, sys; from rl.rollouts.tokenizer import load_tokenizer; "
        f"load_tokenizer(pathlib.Path({str(model)!r})); print('transformers.models.auto.modeling_auto' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert answer.stdout.strip() == "False"
