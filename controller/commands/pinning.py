"""The models of the hub that a run uses, by commit.

So `config.json` says which files were trained, and a resumed run has the same ones.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from controller.runs.folder import CONFIG_FILE
from rl.system.disk import read_json

_MODELS = ("model", "teacher")
"""Fields of a loop's configuration that name models."""


def with_pinned_models(config: Any, tell: Callable[[str], None]) -> Any:
    """The configuration with "ORG/NAME[@revision]" as "ORG/NAME@<commit>". Fetches those models.

    Raises ValueError if one cannot be had.
    """
    from controller.runs.models import pinned

    names = _model_names(config)
    return (
        dataclasses.replace(config, **{field: pinned(name, tell) for field, name in names.items()}) if names else config
    )


def with_recorded_models(config: Any, folder: Path) -> Any:
    """The configuration with the commits that the run in `folder` recorded, where they are of the same models."""
    from controller.runs.models import HubName

    recorded = read_json(folder / CONFIG_FILE)
    same: dict[str, str] = {}
    for field, name in _model_names(config).items():
        ours, theirs = HubName.parse(name), HubName.parse(str(recorded.get(field)))
        if ours is not None and theirs is not None and theirs.is_pinned and ours.repository == theirs.repository:
            same[field] = str(theirs)
    return dataclasses.replace(config, **same) if same else config


def _model_names(config: Any) -> dict[str, str]:
    return {field: name for field in _MODELS if isinstance(name := getattr(config, field, None), str)}
