"""What the options of `ownloop serve` say about each of its models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from controller.server.config import ServeConfig
from generator.openai_calls import OpenAICall


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """One model."""

    directory: Path
    names: tuple[str, ...]
    """By which clients may ask for it. The first one is what the server calls it."""
    tool_parser: str = ""
    """The name of vLLM's parser of tool calls; empty for none."""
    reasoning_parser: str = ""
    """The name of vLLM's parser of reasoning; empty for none."""

    def parse(self, call: OpenAICall) -> OpenAICall:
        """The same request, with this model's parsers."""
        return replace(call, tool_parser=self.tool_parser, reasoning_parser=self.reasoning_parser)


def model_options(config: ServeConfig, models: Mapping[str, Path]) -> list[ModelOptions]:
    """The options of each model. `models` are the directories by the names after `--model`.

    Raises ValueError for a name or a parser that could be any model's, or is of none.
    """
    names = {model: [model, str(directory)] for model, directory in models.items()}
    for further in config.names:
        alias, _, model = further.partition("=")
        model = model or (config.model[0] if len(config.model) == 1 else "")
        if model not in names:
            raise ValueError(
                f"ServeConfig.names has {further!r}; with several models it must be NAME=MODEL, where MODEL is one of "
                f"{', '.join(models)}"
            )
        names[model].append(alias)
    tools = _parsers("tool_parser", config.tool_parser, models)
    reasoning = _parsers("reasoning_parser", config.reasoning_parser, models)
    return [
        ModelOptions(
            directory=directory,
            names=tuple(dict.fromkeys(names[model])),
            tool_parser=tools[model],
            reasoning_parser=reasoning[model],
        )
        for model, directory in models.items()
    ]


def _parsers(field: str, given: Sequence[str], models: Mapping[str, Path]) -> dict[str, str]:
    """The parser of each model: a name alone is for all models, MODEL=PARSER for one of them."""
    found = dict.fromkeys(models, "")
    for entry in sorted(given, key=lambda entry: "=" in entry):  # what is said of one model counts more
        model, _, parser = entry.rpartition("=")
        if model and model not in models:
            raise ValueError(
                f"ServeConfig.{field} has {entry!r}; it must be PARSER, or MODEL=PARSER, where MODEL is one of "
                f"{', '.join(models)}"
            )
        found.update(dict.fromkeys([model] if model else models, parser))
    return found
