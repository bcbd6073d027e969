"""Model directories whose config.json lacks a value, or has one that is not proven."""

import contextlib
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from generator.config import GeneratorConfig
from trainer.config import TrainerConfig
from trainer.engines.model_check import check_model


def _without(config: dict[str, Any], key: str, *, null: bool) -> dict[str, Any]:
    """The configuration without a value, or with null in its place. `key` has dots between its parts."""
    first, _, rest = key.partition(".")
    if rest:
        return {**config, first: _without(config[first], rest, null=null)}
    return {**config, first: None} if null else {name: value for name, value in config.items() if name != first}


def assert_odd_is_refused(model: Path, engine: Any, key: str, *, null: bool, message: str) -> None:
    """The model is accepted, and refused with a message that matches once a value is missing, or null."""
    config = json.loads((model / "config.json").read_text())
    check_model(TrainerConfig(model=model, engine=engine))
    (model / "config.json").write_text(json.dumps(_without(config, key, null=null)))
    with pytest.raises(ValueError, match=message):
        check_model(TrainerConfig(model=model, engine=engine))


def miss_every_value(model: Path) -> None:
    """Whatever is missing, or null, is accepted or a ValueError."""
    config = json.loads((model / "config.json").read_text())
    keys = [f"{outer}.{inner}" for outer, part in config.items() if isinstance(part, dict) for inner in part]
    for key, null in itertools.product([*config, *keys], (False, True)):
        (model / "config.json").write_text(json.dumps(_without(config, key, null=null)))
        checks = (TrainerConfig(model=model), TrainerConfig(model=model, engine="fsdp2"))
        for check in (*(partial(check_model, each) for each in checks), GeneratorConfig(model=model).check_model):
            with contextlib.suppress(ValueError):
                check()


def assert_refused_as_vllm_differs(model: Path, key: str, value: Any) -> None:
    """A setting that vLLM and transformers understand differently is refused."""
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(ValueError, match=f"{key} is {value!r}; vLLM and transformers agree only on"):
        check_model(TrainerConfig(model=model, engine="fsdp2"))
