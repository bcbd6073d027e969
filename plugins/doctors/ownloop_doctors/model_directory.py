"""`ownloop model`: a model's directory, or a new one that can be trained of a checkpoint that cannot.

--text-only writes the language model of one that reads images too, as Qwen3.5 and Gemma 4 are published. --dequantize
writes quantised weights in bfloat16. Formats that it reads:

    mxfp4 (gpt-oss)      NAME_blocks [..., R, G, 16] uint8 holds 2 numbers a byte, the low half first; NAME_scales
                         [..., R, G] uint8 has an exponent, of bias 127, for the 32 numbers of a block
                         (OCP Microscaling Formats 1.0)
    fp8 (DeepSeek-V3)    NAME [N, K] float8_e4m3 with NAME_scale_inv [N / 128, K / 128] float32, the factor of each tile

Weights are read, converted and written one after the other: memory holds one of them and one file of the result.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from controller.commands.output import CapturedOutput
from rl.system.model_files import INDEX_FILE, other_files, weight_files

if TYPE_CHECKING:
    from torch import Tensor

Stored = Mapping[str, Callable[[], "Tensor"]]
"""Name of a stored tensor -> the function that reads it."""
Weights = Iterator[tuple[str, "Tensor"]]
Reader = Callable[[Stored], Weights]
FILE_BYTES = 5 << 30
_LANGUAGE = {"model.language_model.": "model.", "language_model.": ""}
"""How the names of a language model's weights begin where it is one part of a model, and where it is alone."""
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Of 4 bits: a sign, 2 bits of exponent, 1 of mantissa."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Prepares a model and prints its directory."""

    name: Annotated[str, Positional, arg(metavar="NAME")]
    """A name on the hub as ORG/NAME[@REVISION], smollm2-135m-instruct, or a directory."""
    dequantize: Annotated[Path | None, arg(metavar="DIR")] = None
    """Write the model in bfloat16 to this new folder. A model with quantised weights can be trained from there."""
    text_only: Annotated[Path | None, arg(metavar="DIR")] = None
    """Write the language model, without what reads images, to this new folder, in bfloat16."""

    def run(self) -> int:
        """Prints the directory on standard output, and what is being done on standard error."""
        from controller.runs.models import HubName, fetch, resolve_model

        with CapturedOutput() as output:
            local = Path(self.name).expanduser()
            on_hub = None if local.is_dir() else HubName.parse(self.name)
            if self.dequantize and self.text_only:
                raise ValueError("--dequantize and --text-only are both given; run the command once for each, in turn")
            if target := self.dequantize or self.text_only:
                source = local if on_hub is None else fetch(on_hub, output.say, as_published=True)
                directory = target.absolute()
                (dequantize if self.dequantize else write_text_only)(source, directory, output.say)
            else:
                directory = resolve_model(self.name, output.say)
            print(directory, file=output.terminal)
        return 0


def dequantize(source: Path, target: Path, tell: Callable[[str], None], file_bytes: int = FILE_BYTES) -> None:
    """Writes the model of `source` with bfloat16 weights to the new folder `target`, in files of about `file_bytes`.

    An interrupted call leaves no `target`. Raises ValueError if that exists or cannot be written, and for a model
    whose weights are not quantised, or in another format than those above.
    """
    from rl.system.hf_config import read_config_file

    config = dict(read_config_file(source))
    read = _reader(source, config.pop("quantization_config", None))
    _write_model("--dequantize", source, target, config, _told(read(_stored(source)), tell), file_bytes)


def write_text_only(source: Path, target: Path, tell: Callable[[str], None], file_bytes: int = FILE_BYTES) -> None:
    """Writes the language model of `source` with bfloat16 weights to the new folder `target`, as `dequantize` does.

    Raises ValueError as that does, for quantised weights, and for a model without such a part, or with one that
    transformers has no class of its own for.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from rl.system.hf_config import read_config_file

    whole = read_config_file(source)
    config = dict(whole.get("text_config") or {})
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")))
    if whole.get("quantization_config"):
        raise ValueError(f"{source} holds quantised weights; --dequantize writes them first")
    if architecture is None:
        raise ValueError(
            f"{source} has model_type {config.get('model_type')!r} in the text_config of config.json; it must be one "
            "that transformers has a class for"
        )
    stored = _stored(source)
    if not any(name.startswith(prefix) for name in stored for prefix in _LANGUAGE):
        raise ValueError(
            f"{source} has no weights of a language model; their names begin with {' or '.join(_LANGUAGE)}"
        )
    tied = whole.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    config |= {"architectures": [architecture], "tie_word_embeddings": tied}
    _write_model("--text-only", source, target, config, _told(_of_language(stored), tell), file_bytes)


def _of_language(stored: Stored) -> Weights:
    """The weights of a language model that is one part of a model, under the names that it has alone."""
    for name, read in stored.items():
        for prefix, alone in (*_LANGUAGE.items(), ("lm_head.", "lm_head.")):
            if name.startswith(prefix):
                yield alone + name.removeprefix(prefix), read()


def _write_model(
    option: str, source: Path, target: Path, config: dict[str, object], weights: Weights, file_bytes: int
) -> None:
    """Writes a model with these settings and weights, and all other files of `source`, to the new folder `target`."""
    from safetensors import SafetensorError

    from rl.system.hf_config import inspect_model

    if target.exists():
        raise ValueError(f"{option} is {target}, which exists; name a new folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            made.mkdir()
            _write_weights(made, weights, file_bytes)
            for file in other_files(source):
                (made / file).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / file, made / file)
            config.pop("torch_dtype", None)
            (made / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2))
            inspect_model(made)
            made.rename(target)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{option} is {target}: {getattr(error, 'strerror', None) or error}") from error


def _reader(source: Path, settings: Mapping[str, Any] | None) -> Reader:
    """What reads the weights of this `quantization_config`."""
    if settings is None:
        raise ValueError(f"{source} has no quantization_config in config.json; its weights can be trained as they are")
    method, tile = settings.get("quant_method"), settings.get("weight_block_size")
    if method == "mxfp4":
        return _read_mxfp4
    if method == "fp8" and tile is not None:
        return partial(_read_fp8, tile=tuple(tile))
    found = f"quant_method {method!r}" + (" without weight_block_size" if method == "fp8" else "")
    raise ValueError(f"{source}: quantization_config has {found}; read are 'mxfp4', and 'fp8' with weight_block_size")


def _stored(source: Path) -> Stored:
    from safetensors import safe_open

    shards = [safe_open(file, "pt") for file in weight_files(source)]
    return {name: partial(shard.get_tensor, name) for shard in shards for name in shard.keys()}  # noqa: SIM118


def _read_mxfp4(stored: Stored) -> Weights:
    import torch

    for name, read in stored.items():
        if name.endswith("_blocks"):
            base = name.removesuffix("_blocks")
            if (scales := stored.get(f"{base}_scales")) is None:
                raise ValueError(f"no file holds {base}_scales, which {name} needs")
            experts = zip(read(), scales(), strict=True)
            # Models multiply from the right: [E, R, C] of the file is [E, C, R] of theirs.
            yield base, torch.stack([mxfp4(blocks, scales).T for blocks, scales in experts])
        elif not name.endswith("_scales"):
            yield name, read()


def mxfp4(blocks: "Tensor", scales: "Tensor") -> "Tensor":
    """[R, G, 16] and [R, G], both uint8 -> [R, 32 G] bfloat16."""
    import torch

    numbers = torch.tensor(_NUMBERS)
    pairs = torch.stack([numbers[(blocks & 15).int()], numbers[(blocks >> 4).int()]], dim=-1)
    return torch.ldexp(pairs.flatten(-2), scales.int().unsqueeze(-1) - 127).bfloat16().flatten(-2)


def _read_fp8(stored: Stored, tile: tuple[int, int]) -> Weights:
    for name, read in stored.items():
        if (factors := stored.get(f"{name}_scale_inv")) is not None:
            yield name, fp8(read(), factors(), tile)
        elif not name.endswith("_scale_inv"):
            yield name, read()


def fp8(weight: "Tensor", factors: "Tensor", tile: tuple[int, int]) -> "Tensor":
    """[N, K] float8 times the factor of its tile -> [N, K] bfloat16. Tiles at the edges may be smaller."""
    rows, columns = weight.shape
    factors = factors.float().repeat_interleave(tile[0], 0)[:rows].repeat_interleave(tile[1], 1)[:, :columns]
    return (weight.float() * factors).bfloat16()


def _told(weights: Iterable[tuple[str, "Tensor"]], tell: Callable[[str], None]) -> Weights:
    """The weights as they are, with a message where a layer begins."""
    before = ""
    for name, tensor in weights:
        layer = ".".join(name.split(".")[:3])
        if layer != before:
            tell(f"converting {layer}")
        before = layer
        yield name, tensor


def _write_weights(directory: Path, weights: Iterable[tuple[str, "Tensor"]], file_bytes: int) -> None:
    """Writes files of about `file_bytes`, and the index that names them."""
    import torch
    from safetensors.torch import save_file

    from rl.weights.version import weight_dtype

    weight_map, held, total = dict[str, str](), dict[str, torch.Tensor](), 0

    def write() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(held, directory / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(held, file))
        held.clear()

    for name, tensor in weights:
        if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"{name} is of {tensor.dtype}, and no file holds its scales")
        held[name] = tensor.to(weight_dtype(name, torch.bfloat16)).contiguous()
        total += held[name].nbytes
        if sum(each.nbytes for each in held.values()) >= file_bytes:
            write()
    if held:
        write()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2))
