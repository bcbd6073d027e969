"""Environments by name, for the command line."""

import importlib
import sys
from typing import Any

from controller.commands.recipes import find_recipe, load_recipe
from rl.protocols import Env


def load_env(name: str) -> Env:
    """The environment of a recipe, or what "module:name" names: an environment, or a class or function that makes one.

    Raises ValueError for what cannot be found or made.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        config = load_recipe(find_recipe(name))
        env: Any = getattr(config, "env", None)
        if env is None:
            raise ValueError(f"recipe {name} has no environment")
        return env
    if "" not in sys.path:
        sys.path.insert(0, "")  # a module of the working directory, as with `python -m`
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
        made: Any = found() if callable(found) else found
        return made
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"environment {name!r} cannot be made: {error}") from error
