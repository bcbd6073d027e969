"""Models of the hub, with the real client against a server on loopback."""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from importlib import metadata
from pathlib import Path

import pytest

from controller.runs.models import HubName
from rl.system.hf_config import inspect_model, read_config
from rl.system.model_files import INDEX_FILE
from rl.tiny_models import tiny_llama
from tests.controller.runs.hub import Hub, running_hub
from tests.waiting import LIMIT_S, wait_for_end

pytestmark = pytest.mark.seconds

ROOT = Path(__file__).parents[3]
NAME = "lab/Tiny-1.5B"
TEMPLATE = "additional_chat_templates/tool_use.jinja"
FETCH = """
import os, resource, sys
if largest := os.environ.get("LARGEST_FILE"):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest),) * 2)
from controller.runs.models import pinned, resolve_model
for name in sys.argv[1:]:
    try:
        print(resolve_model(name, lambda text: print("told:", text)))
        print(pinned(name))
    except ValueError as error:
        print("error:", error)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A repository as they are on the hub: weights in other formats beside those that are needed."""
    path = tiny_llama(tmp_path_factory.mktemp("hub") / "model", hidden_size=256, intermediate_size=512)
    others = {"pytorch_model.bin": b"pickle", "original/model.safetensors": b"other", "README.md": b"# Tiny"}
    others |= {TEMPLATE: b"{{ tools }}", "onnx/config.json.txt": b"other", INDEX_FILE: b"{}"}
    return {file.name: file.read_bytes() for file in path.iterdir()} | others


@pytest.fixture
def hub(files: dict[str, bytes]) -> Generator[Hub]:
    """A hub that has the model."""
    with running_hub() as hub:
        hub.add(NAME, files)
        yield hub


def start(hub_url: str, cache: Path, *names: str, **env: str) -> subprocess.Popen[str]:
    """A process that wants models: the client reads its settings when it is imported."""
    settings = {"HF_HOME": str(cache), "HF_ENDPOINT": hub_url, "HF_HUB_OFFLINE": "0", **env}
    inherited = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    command = [sys.executable, "-c", FETCH, *names]
    return subprocess.Popen(command, cwd=ROOT, env={**inherited, **settings}, stdout=subprocess.PIPE, text=True)


def fetch(hub_url: str, cache: Path, *names: str, **env: str) -> list[str]:
    """The lines that it prints, without those about progress."""
    lines = wait_for_end(start(hub_url, cache, *names, **env), f"fetching {names}")[1].splitlines()
    return [line for line in lines if not line.startswith("told: ")]


def test_only_what_is_needed_is_fetched_and_only_once(hub: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    commit = hub.add(NAME, files)
    path, name = fetch(hub.url, tmp_path, NAME, HF_TOKEN="hf_secret")
    assert name == f"{NAME}@{commit}"
    inspect_model(Path(path))
    assert read_config(Path(path))["hidden_size"] == 256
    assert Path(path).name == commit
    assert hub.tokens == {"hf_secret"}
    assert set(hub.fetched) == {f for f in files if f.endswith(".json") and f != INDEX_FILE} | {
        "model.safetensors",
        TEMPLATE,
    }
    assert set(hub.fetched.values()) == {1}

    # A later commit is fetched by the name, and the earlier one is still there by its own, without the hub.
    later = hub.add(NAME, {**files, "config.json": files["config.json"] + b"\n"})
    assert fetch(hub.url, tmp_path, NAME)[1] == f"{NAME}@{later}"
    assert hub.fetched["config.json"] == 2
    assert hub.fetched["model.safetensors"] == 1
    offline = fetch(hub.url, tmp_path, name, NAME, HF_HUB_OFFLINE="1")
    assert offline == [path, name, path.replace(commit, later), f"{NAME}@{later}"]


def test_an_interrupted_download_is_completed(hub: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    hub.may_complete.clear()
    first = start(hub.url, tmp_path, NAME)
    assert hub.half_sent.wait(LIMIT_S), f"waited {LIMIT_S:g} s in vain for half of the file"
    first.kill()
    wait_for_end(first, "the process that was killed")
    hub.may_complete.set()
    (offline,) = fetch(hub.url, tmp_path, NAME, HF_HUB_OFFLINE="1")
    assert "nor complete in the cache" in offline
    lines = wait_for_end(start(hub.url, tmp_path, NAME), "fetching the rest")[1].splitlines()
    size = len(files["model.safetensors"]) / 1e6
    assert f"told: fetching {NAME}: 100% of {size:,.0f} MB" in lines
    assert (Path(lines[-2]) / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert hub.fetched["config.json"] == 1
    assert hub.fetched["model.safetensors"] == 2


def test_names_that_cannot_be_had(hub: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    hub.add("lab/gated", files)
    hub.gated.add("lab/gated")
    no_weights = {file: content for file, content in files.items() if file != "model.safetensors"}
    hub.add("lab/damaged", no_weights)
    hub.add("lab/pickle", {file: content for file, content in no_weights.items() if file != INDEX_FILE})
    other = {**json.loads(files["config.json"]), "architectures": ["BertModel"]}
    hub.add("lab/other", {**files, "config.json": json.dumps(other).encode()})
    url = hub.url
    said = {
        "lab/absent": f"is neither a directory here nor a model at {url}/lab/absent; if it is private, log in with",
        f"{NAME}@v9": f"has no revision 'v9'; {url}/{NAME} names those it has",
        "lab/gated": f"is gated: accept its terms at {url}/lab/gated, then log in with `hf auth login` or set HF_TOKEN",
        "lab/pickle": "has no model.safetensors on the hub: ownloop reads safetensors only",
        "lab/damaged": "model.safetensors.index.json has no weight_map",
        "lab/other": "is of architecture BertModel, which is no language model",
    }
    lines = fetch(hub.url, tmp_path, *said)
    for line, (name, part) in zip(lines, said.items(), strict=True):
        assert line.startswith("error: model")
        assert name.partition("@")[0] in line.replace("--", "/")
        assert part in line
    assert "model.safetensors" not in hub.fetched, "the weights are only fetched once the rest is right"


def test_a_cache_without_room_is_named(hub: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    (line,) = fetch(hub.url, tmp_path, NAME, LARGEST_FILE="100000")
    assert line.startswith(f"error: model {NAME}@")
    reason = "File too large; HF_HOME names another directory"
    assert line.endswith(f" cannot be kept in the cache {tmp_path / 'hub'}: {reason}")
    path, _ = fetch(hub.url, tmp_path, NAME)
    assert (Path(path) / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_without_a_network(tmp_path: Path) -> None:
    (offline,) = fetch("http://127.0.0.1:9", tmp_path, NAME, HF_HUB_OFFLINE="1")
    start = f"error: model {NAME} is neither a directory here nor complete in the cache {tmp_path / 'hub'}, and"
    end = f"; where there is a network, `hf download {NAME} --local-dir DIR` makes a directory to copy here and to name"
    assert offline == f"{start} HF_HUB_OFFLINE is set{end} as the model"
    (refused,) = fetch("http://127.0.0.1:9", tmp_path, NAME)
    assert refused == f"{start} http://127.0.0.1:9 cannot be reached (Connection refused){end} as the model"


def test_names_of_the_hub() -> None:
    assert HubName.parse("Qwen/Qwen2.5-1.5B-Instruct") == HubName(
        repository="Qwen/Qwen2.5-1.5B-Instruct", revision=None
    )
    assert HubName.parse("a/b@refs/pr/1") == HubName(repository="a/b", revision="refs/pr/1")
    for other in ("smollm2-135m-instruct", "./a/b", "/a/b", "~/a/b", "a/b/c", "../a", "a/b@"):
        assert HubName.parse(other) is None


@pytest.mark.slow  # it installs a package
def test_the_other_major_version_of_the_client_does_the_same(tmp_path: Path) -> None:
    other = "huggingface_hub>=2,<3" if metadata.version("huggingface_hub") < "2" else "huggingface_hub>=1.31,<2"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps"]
    subprocess.run([*pip, "--target", tmp_path / "other", other], check=True)
    tests = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", __file__]
    subprocess.run(tests, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path / "other")}, check=True)
