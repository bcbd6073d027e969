"""What the options of `ownloop serve` say about several models."""

from pathlib import Path
from typing import Any

import pytest

from generator.openai_calls import OpenAICall
from ownloop_server.config import ModelOptions, ServeConfig, model_options

MODELS = {"org/one": Path("/models/one"), "two": Path("/models/two")}


def options_of(**fields: Any) -> dict[str, ModelOptions]:
    """By the first name."""
    return {
        of_model.names[0]: of_model for of_model in model_options(ServeConfig(model=tuple(MODELS), **fields), MODELS)
    }


def test_a_parser_is_for_all_models_unless_one_of_them_is_named() -> None:
    found = options_of(tool_parser=("org/one=llama3_json", "hermes"), reasoning_parser=("two=qwen3",))
    assert [(o.tool_parser, o.reasoning_parser) for o in found.values()] == [("llama3_json", ""), ("hermes", "qwen3")]
    call = found["two"].parse(OpenAICall(kind="chat", body=b"{}", policy=None, model="client"))
    assert (call.tool_parser, call.reasoning_parser, call.model) == ("hermes", "qwen3", "client")


def test_further_names_are_of_one_model() -> None:
    found = options_of(names=("short=org/one",))
    assert found["org/one"].names == ("org/one", "/models/one", "short")
    assert found["two"].names == ("two", "/models/two")


@pytest.mark.parametrize(
    ("field", "entry", "text"),
    [
        ("names", "short", r"names has 'short'.*NAME=MODEL.*org/one, two"),
        ("names", "short=three", r"names has 'short=three'.*org/one, two"),
        ("tool_parser", "three=hermes", r"tool_parser has 'three=hermes'.*MODEL=PARSER.*org/one, two"),
        ("reasoning_parser", "three=qwen3", r"reasoning_parser has 'three=qwen3'.*org/one, two"),
    ],
)
def test_what_is_of_no_model_is_refused(field: str, entry: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        options_of(**{field: (entry,)})
