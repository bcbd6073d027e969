"""The files of a Hugging Face model directory: the weights, as transformers chooses them, and what belongs to them.

Every reader of weights asks here: trainer, generator, fetches from the hub, identity checks. Only headers are read,
except where a tied model's files repeat the output projection, which is compared with the embedding.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TEMPLATES_FOLDER = "additional_chat_templates"
"""Where transformers 5 keeps a tokenizer's chat templates other than the default one."""
OTHER_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", f"{TEMPLATES_FOLDER}/*.jinja")
"""The files of configuration, tokenizer and chat templates."""
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files that transformers loads: model.safetensors, otherwise the files that the index names.

    Raises ValueError if there are none, and if one is missing, incomplete or of another format.
    """
    single, index = path / SINGLE_FILE, path / INDEX_FILE
    if single.is_file():
        files = [single]
    elif index.is_file():
        files = [path / name for name in indexed_names(index)]
        if missing := [file.name for file in files if not file.is_file()]:
            raise ValueError(f"model directory {path} lacks {', '.join(missing)}, which {INDEX_FILE} names")
    else:
        suffixes = {".bin", ".pt", ".pth", ".gguf", ".safetensors"}
        others = sorted(file.name for file in path.glob("*") if file.suffix in suffixes)
        found = f"; {', '.join(others)} cannot be used" if others else ""
        raise ValueError(f"model directory {path} has no weights; {SINGLE_FILE} or {INDEX_FILE} is needed{found}")
    for file in files:
        _shapes(file)
    return tuple(files)


def indexed_names(index: Path) -> tuple[str, ...]:
    """The names of the files with weights that an index names. Raises ValueError for an index that names none."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name) for name in weight_map.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        names = set[str]()
    if not names:
        raise ValueError(f"{index} has no weight_map")
    if elsewhere := sorted(name for name in names if Path(name).name != name):
        raise ValueError(f"{index} names {elsewhere[0]!r}; the files must be in the directory of the index")
    return tuple(sorted(names))


def check_no_stray_weights(path: Path) -> None:
    """Raises ValueError if vLLM would load other files than transformers: it takes the index first, or every file."""
    chosen, index = {file.name for file in weight_files(path)}, path / INDEX_FILE
    served = set(indexed_names(index)) if index.is_file() else {file.name for file in path.glob("*.safetensors")}
    if others := sorted(served - chosen) or sorted(chosen - served):
        raise ValueError(
            f"model directory {path} holds {', '.join(sorted(chosen | served))}: transformers loads "
            f"{', '.join(sorted(chosen))} and vLLM {', '.join(sorted(served))}; move {', '.join(others)} elsewhere"
            f"{', or remove ' + INDEX_FILE if index.is_file() else ''}"
        )


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model directory's weights, without old checkpoints' buffers. Raises ValueError as above."""
    return {name: shape for name, (_, shape) in _stored(path).items()}


def check_head(path: Path, *, tied: bool) -> None:
    """Raises ValueError if configuration and files disagree on whether the output layer is the embedding matrix.

    Files of a tied model may repeat the matrix. Where they hold another one, transformers and vLLM leave the two
    untied, against the configuration; an engine that follows the configuration would drop the head.
    """
    stored = _stored(path)
    (head, _), (embedding, _) = stored.get(_HEAD, (None, ())), stored.get(_EMBEDDING, (None, ()))
    setting = f"model directory {path}: tie_word_embeddings is {'true' if tied else 'false'} by config.json"
    if tied and head is not None and embedding is None:
        raise ValueError(f"{setting}, and {head.name} holds {_HEAD} only; name it {_EMBEDDING}")
    if tied and head is not None and embedding is not None and not _holds_equal(head, embedding):
        raise ValueError(
            f"{setting}, but {_HEAD} in {head.name} is another matrix than {_EMBEDDING}; set tie_word_embeddings "
            f"to false to keep both, or remove {_HEAD} to keep the embedding only"
        )
    if not tied and head is None and embedding is not None:
        raise ValueError(f"{setting}, but no file holds {_HEAD}; set it to true if the output layer is the embedding")


def other_files(path: Path) -> Iterator[Path]:
    """Configuration, tokenizer and chat templates, relative to the directory; the index of the weights is left out."""
    for pattern in OTHER_PATTERNS:
        for file in sorted(path.glob(pattern)):
            if file.is_file() and not file.name.endswith(".index.json"):
                yield file.relative_to(path)


def _holds_equal(head: Path, embedding: Path) -> bool:
    """Whether the output projection in one file has the bytes of the embedding in another, or in the same."""
    import torch

    with safe_open(head, "pt") as of_head, safe_open(embedding, "pt") as of_embedding:
        one, other = of_head.get_tensor(_HEAD), of_embedding.get_tensor(_EMBEDDING)
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _stored(path: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """The file and the shape of each weight."""
    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in weight_files(path):
        for name, shape in _shapes(file).items():
            if name in found:
                raise ValueError(f"both {found[name][0]} and {file.name} hold {name}; keep one of them")
            found[name] = file, shape
    return {name: stored for name, stored in found.items() if not name.endswith("rotary_emb.inv_freq")}


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights in a file. Raises ValueError if it is incomplete or of another format."""
    try:
        with safe_open(file, "np") as weights:
            return {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} is incomplete or not a safetensors file: {error}") from error
