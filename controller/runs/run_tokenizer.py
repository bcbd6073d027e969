"""The tokenizer of a run's model, to show its tokens as text. Loads no model and does not import transformers."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from controller.runs.folder import CONFIG_FILE
from controller.runs.models import resolve_model
from rl.system.files import read_json


def decoder_of(run: Path) -> Callable[[Sequence[int]], str] | None:
    """Tokens -> text, special tokens included; None if the run's model is not here or has another kind of tokenizer."""
    try:
        config = read_json(run / CONFIG_FILE)
        return _decoder(resolve_model(str(config["model"])) / "tokenizer.json")
    except (ValueError, KeyError, OSError):
        return None


@lru_cache(maxsize=1)
def _decoder(file: Path) -> Callable[[Sequence[int]], str] | None:
    from tokenizers import Tokenizer

    if not file.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(file))

    def decode(tokens: Sequence[int]) -> str:
        return tokenizer.decode([*tokens], skip_special_tokens=False)

    return decode
