"""The files of a Hugging Face model directory: the weights, as transformers chooses them, and what belongs to them.

Every reader of weights asks here: trainer, generator, fetches from the hub, identity checks. Only headers are read,
except where a tied model's files repeat the output projection, which is compared with the embedding.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TEMPLATES_FOLDER = "additional_chat_templates"
"""Where transformers 5 keeps a tokenizer's chat templates other than the default one."""
OTHER_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", f"{TEMPLATES_FOLDER}/*.jinja")
"""The files of configuration, tokenizer and chat templates."""
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_BLOCK = 1 << 24


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Where a weight is stored."""

    file: Path
    dtype: str
    """The dtype as safetensors spells it, such as "BF16"."""
    shape: tuple[int, ...]
    start: int
    """Where its data begin, in bytes from the beginning of the file."""
    num_bytes: int


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
        _check_complete(file)
    return tuple(files)


def indexed_names(index: Path) -> tuple[str, ...]:
    """The names of the files with weights that an index names. Raises ValueError for an index that names none."""
    try:
        weight_map: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
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


def stored_weights(path: Path) -> Mapping[str, StoredWeight]:
    """The weights of a model directory by name, without old checkpoints' buffers. Raises ValueError as above."""
    found: dict[str, StoredWeight] = {}
    for file in weight_files(path):
        entries, data_start = _read_header(file)
        for name, entry in entries.items():
            start, end = entry["data_offsets"]
            if name in found:
                raise ValueError(f"both {found[name].file} and {file.name} hold {name}; keep one of them")
            found[name] = StoredWeight(
                file, str(entry.get("dtype")), tuple(entry["shape"]), data_start + start, end - start
            )
    return {name: weight for name, weight in found.items() if not name.endswith("rotary_emb.inv_freq")}


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model directory's weights. Raises ValueError as above."""
    return {name: weight.shape for name, weight in stored_weights(path).items()}


def check_head(path: Path, *, tied: bool) -> None:
    """Raises ValueError if configuration and files disagree on whether the output layer is the embedding matrix.

    Files of a tied model may repeat the matrix. Where they hold another one, transformers and vLLM leave the two
    untied, against the configuration; an engine that follows the configuration would drop the head.
    """
    stored = stored_weights(path)
    head, embedding = stored.get(_HEAD), stored.get(_EMBEDDING)
    setting = f"model directory {path}: tie_word_embeddings is {'true' if tied else 'false'} by config.json"
    if tied and head is not None and embedding is None:
        raise ValueError(f"{setting}, and {head.file.name} holds {_HEAD} only; name it {_EMBEDDING}")
    if tied and head is not None and embedding is not None and not _equal(head, embedding):
        raise ValueError(
            f"{setting}, but {_HEAD} in {head.file.name} is another matrix than {_EMBEDDING}; set tie_word_embeddings "
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


def _equal(one: StoredWeight, other: StoredWeight) -> bool:
    """Whether both have the same bytes."""
    if (one.dtype, one.shape, one.num_bytes) != (other.dtype, other.shape, other.num_bytes):
        return False
    return all(a == b for a, b in zip(_blocks(one), _blocks(other), strict=True))


def _blocks(weight: StoredWeight) -> Iterable[bytes]:
    with weight.file.open("rb") as stream:
        stream.seek(weight.start)
        left = weight.num_bytes
        while left > 0:
            yield stream.read(min(left, _BLOCK))
            left -= _BLOCK


def _check_complete(file: Path) -> None:
    """Compares the file's size with the end of its data as its header states it, which detects a truncated copy."""
    size = file.stat().st_size
    weights, data_start = _read_header(file)
    expected = data_start + max((entry["data_offsets"][1] for entry in weights.values()), default=0)
    if size != expected:
        raise ValueError(f"{file} is incomplete: {size} bytes of {expected}")


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """What a safetensors file says of each of its weights, and the byte at which its data begin.

    Format: https://huggingface.co/docs/safetensors/index#format
    """
    try:
        with file.open("rb") as stream:
            (header_size,) = struct.unpack("<Q", stream.read(8))
            if header_size > file.stat().st_size:
                raise ValueError("its header is cut off")
            header = cast("dict[str, Any]", json.loads(stream.read(header_size)))
        weights = {name: entry for name, entry in header.items() if name != "__metadata__"}
        malformed = next((name for name, entry in weights.items() if not {"shape", "data_offsets"} <= set(entry)), "")
        if malformed:
            raise ValueError(f"it gives no shape and place of {malformed!r}")
    except (struct.error, ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from error
    return weights, 8 + header_size
