"""transformers is imported faster, and is then what it is without that."""

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.seconds

_LOOK = """
import builtins, importlib.metadata, json, os, sys
opened, looked_up = [], []
plain_open, plain_distributions = builtins.open, importlib.metadata.packages_distributions
builtins.open = lambda file, *args, **options: (opened.append(os.fspath(file)), plain_open(file, *args, **options))[1]
importlib.metadata.packages_distributions = lambda: (looked_up.append(1), plain_distributions())[1]
import transformers.models
builtins.open = plain_open
at_import = len(looked_up)
from transformers.utils import import_utils as utils
models = [file for file in opened if "/transformers/models/" in file and isinstance(file, str)]
structure = utils.define_import_structure(transformers.models.__path__[0])
as_lists = lambda found: sorted((sorted(k), sorted((m, sorted(n)) for m, n in v.items())) for k, v in found.items())
print(json.dumps({
    "looked_up": at_import,
    "models": len(models),
    "models_twice": len(models) - len(set(models)),
    "names": sorted(dir(transformers)),
    "structure": as_lists(structure),
    "of_llama": as_lists(utils.define_import_structure(os.path.join(transformers.models.__path__[0], "llama"))),
    "distributions": sorted((name, sorted(found)) for name, found in utils.PACKAGE_DISTRIBUTION_MAPPING.items()),
    "expected": sorted((name, sorted(found)) for name, found in plain_distributions().items()),
    "versions": [utils._is_package_available(name, return_version=True) for name in
                 ("torch", "PIL", "yaml", "tokenizers", "vllm", "no_such_package", "json")],
    "exports": [utils.fetch__all__(text) for text in
                ('__all__ = ["a", "b"]', 'x = 1\\n__all__ = [\\n    "a",\\n]\\n', 'f("__all__")\\n', "",
                 '__all__ = ["a"]\\n__all__ = ["b"]\\n')],
    "loader": type(utils.__loader__).__name__,
    "llama": transformers.LlamaConfig().model_type,
}))
"""


def _looks(*first: str) -> dict[str, Any]:
    script = "\n".join([*first, _LOOK])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_transformers_is_the_same_and_reads_each_file_of_its_models_once() -> None:
    hasten = "from rl.transformers_import import hasten_transformers"
    plain, hastened = _looks(), _looks(hasten, "hasten_transformers()", "hasten_transformers()")
    assert (plain.pop("looked_up"), hastened.pop("looked_up")) == (1, 0)
    assert plain.pop("models_twice") == hastened["models"]
    assert hastened.pop("models_twice") == 0
    assert hastened.pop("models") == plain.pop("models") / 2
    assert hastened["distributions"] == hastened["expected"]
    assert hastened == plain


def test_once_transformers_is_there_nothing_is_replaced() -> None:
    script = (
        "import sys, transformers\nfrom transformers.utils import import_utils as utils\n"
        "before = dict(vars(utils))\nfrom rl.transformers_import import hasten_transformers\nhasten_transformers()\n"
        "print(vars(utils) == before, sum(type(each).__module__ == 'rl.transformers_import' for each in sys.meta_path))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", "0"]
