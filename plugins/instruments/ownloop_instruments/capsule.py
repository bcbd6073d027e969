"""One micro-batch of a run as a file, with all that its gradient depends on but the weights, which it names.

    b"ownloop capsule 1\n" + sha256 of what follows, in hex + b"\n" + a safetensors file

The tensors are the datums' arrays, the random state and what was computed; the safetensors header has the rest as JSON.
Reading one runs no code. A loss of the user's own is named "module:function"; its source is in the file to be read, and
a replay imports the function by its name.
"""

import hashlib
import inspect
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ownloop_instruments.computation import ROUNDING, Computation, Summary, compute
from ownloop_instruments.cut import Cut
from ownloop_instruments.one_process import lone_engine
from rl.lora import LoRAConfig
from rl.losses import get_loss
from rl.sampling import KeptSets
from rl.system.disk import to_json, write_whole
from rl.types import Datum
from trainer.config import TrainerConfig

MAGIC = b"ownloop capsule 1\n"
_KEPT = ("model", "gpus", "placement", "profile_steps", "deadlines")  # what a replay chooses itself
_PACKAGES = ("ownloop", "torch", "transformers", "torchtitan", "numpy")
_MOST_TOLD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Capsule:
    """A micro-batch, how it is computed, and what came of it."""

    data: tuple[Datum, ...]
    loss: str
    loss_config: Mapping[str, object]
    trainer: Mapping[str, Any]
    """The run's `TrainerConfig` in JSON types, without its model."""
    facts: Mapping[str, Any]
    """Of the run: its name, step, micro-batch, configuration, versions, grad_scale and source of the loss."""
    weights: Mapping[str, str]
    """Paths `model` and `checkpoint`, which is empty for the model's own weights; `model_digest`, `checkpoint_digest`:
    that of the model is empty where the checkpoint has all weights."""
    random_state: NDArray[np.uint8]
    """Torch's, of the CPU, before the computation."""
    computed: Computation
    cut: Cut | None = None
    """What a replay from a layer on needs in place of the weights, which `weights` then does not name."""

    def trainer_config(self, **changes: object) -> TrainerConfig:
        """The configuration of a trainer that computes it."""
        adapter = self.trainer["lora"]
        lora = None if adapter is None else LoRAConfig(**adapter)
        values: dict[str, Any] = {**self.trainer, "lora": lora, **changes}
        return TrainerConfig(**values)


def facts_here() -> dict[str, Any]:
    """Versions and hardware of this process."""
    return {
        "versions": {name: version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def digest_of(path: Path) -> str:
    """Of all files in a directory, with their names; of what a model or a checkpoint is made of."""
    whole = hashlib.sha256()
    for file in sorted(each for each in path.rglob("*") if each.is_file() and each.name != ".lock"):
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        whole.update(f"{file.relative_to(path)} {content}\n".encode())
    return whole.hexdigest()


def source_of(loss: str) -> str:
    """The source of the function that a loss names, to see whether it has changed; empty where there is none."""
    try:
        return inspect.getsource(inspect.unwrap(get_loss(loss).function))
    except (OSError, TypeError):
        return ""


def write_capsule(capsule: Capsule, file: Path) -> None:
    """Writes the file. Raises ValueError for data with images, which a capsule does not hold."""
    arrays: dict[str, NDArray[Any]] = {"random_state": capsule.random_state}
    for number, datum in enumerate(capsule.data):
        if datum.images:
            raise ValueError(f"datum {number} has images; a capsule holds text alone")
        arrays |= _arrays(datum, f"data.{number}")
    arrays |= {f"computed.{n}": each.pieces for n, each in enumerate(capsule.computed.values.values())}
    rest = {name: to_json(getattr(capsule, name)) for name in ("loss", "loss_config", "trainer", "facts", "weights")}
    if capsule.cut is not None:
        arrays |= {"cut.hidden": capsule.cut.hidden, **{f"cut.weights.{n}": a for n, a in capsule.cut.weights.items()}}
        rest["cut"] = {"layer": capsule.cut.layer, "config": capsule.cut.config}
    values = [[name, each.digest, each.num_not_finite] for name, each in capsule.computed.values.items()]
    header = {
        **rest,
        "temperatures": [datum.temperature for datum in capsule.data],
        "values": values,
        "total": repr(capsule.computed.loss),  # JSON has no NaN
    }
    payload = save({name: np.ascontiguousarray(a) for name, a in arrays.items()}, {"capsule": json.dumps(header)})
    write_whole(file, MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)


def _arrays(datum: Datum, prefix: str) -> Iterator[tuple[str, NDArray[Any]]]:
    yield f"{prefix}.tokens", datum.tokens
    yield from ((f"{prefix}.inputs.{name}", array) for name, array in datum.loss_inputs.items())
    if datum.kept is not None:
        yield from ((f"{prefix}.kept.ids", datum.kept.ids), (f"{prefix}.kept.starts", datum.kept.starts))
    if datum.routes is not None:
        yield f"{prefix}.routes", datum.routes


def read_capsule(file: Path) -> Capsule:
    """Reads a file. Raises ValueError for one that is no capsule, and for one of which a byte has changed."""
    if not file.is_file():
        raise ValueError(f"there is no capsule {file}")
    whole = file.read_bytes()
    if not whole.startswith(MAGIC):
        raise ValueError(f"{file} is no capsule: it does not begin with {MAGIC!r}")
    digest, _, payload = whole[len(MAGIC) :].partition(b"\n")
    if hashlib.sha256(payload).hexdigest().encode() != digest:
        raise ValueError(f"{file} has changed since it was written: its bytes have another sha256 than it says")
    try:
        arrays = load(payload)
    except SafetensorError as error:
        raise ValueError(f"{file} is no capsule: {error}") from None
    size = int.from_bytes(payload[:8], "little")
    header = json.loads(json.loads(payload[8 : 8 + size])["__metadata__"]["capsule"])
    summaries = {
        name: Summary(digest, bad, arrays[f"computed.{n}"]) for n, (name, digest, bad) in enumerate(header["values"])
    }
    return Capsule(
        data=tuple(_datum(arrays, f"data.{n}.", t) for n, t in enumerate(header["temperatures"])),
        random_state=arrays["random_state"],
        computed=Computation(summaries, float(header["total"])),
        cut=_cut(header, arrays),
        **{name: header[name] for name in ("loss", "loss_config", "trainer", "facts", "weights")},
    )


def _cut(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Cut | None:
    if "cut" not in header:
        return None
    prefix = "cut.weights."
    weights = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    return Cut(**header["cut"], hidden=arrays["cut.hidden"], weights=weights)


def _datum(arrays: Mapping[str, NDArray[Any]], prefix: str, temperature: float) -> Datum:
    own = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    inputs = {name.removeprefix("inputs."): array for name, array in own.items() if name.startswith("inputs.")}
    kept = KeptSets(own["kept.ids"], own["kept.starts"]) if "kept.ids" in own else None
    return Datum(tokens=own["tokens"], loss_inputs=inputs, temperature=temperature, kept=kept, routes=own.get("routes"))


def trainer_json(config: TrainerConfig) -> dict[str, Any]:
    """A trainer's configuration as a capsule keeps it."""
    return {each.name: to_json(getattr(config, each.name)) for each in fields(config) if each.name not in _KEPT}


def replay(
    capsule: Capsule, model: Path | None = None, checkpoint: Path | None = None, **changes: object
) -> tuple[Computation, list[str]]:
    """Computes a capsule in this process. Returns what came of it, and what differs here from where it was made.

    `model` and `checkpoint` say where the directories lie here; None for where they lay. `changes` are fields of the
    trainer's configuration. Raises ValueError for weights of another digest.
    """
    here = {name: weights_of(capsule, name, path) for name, path in (("model", model), ("checkpoint", checkpoint))}
    config, loss = capsule.trainer_config(**changes), get_loss(capsule.loss, capsule.loss_config)
    torch.set_num_threads(config.num_threads)
    layers = any(name.startswith("output of ") for name in capsule.computed.values)
    if capsule.cut is not None:
        if config.engine != capsule.trainer["engine"]:
            raise ValueError(f"--engine is {config.engine}; the kept input is laid out for {capsule.trainer['engine']}")
        found = capsule.cut.compute(config, capsule.data, loss, layers=layers)
    else:
        assert here["model"] is not None
        engine = lone_engine(config, here["model"], here["checkpoint"])
        torch.set_rng_state(torch.from_numpy(capsule.random_state.copy()))
        found = compute(engine, capsule.data, loss, layers=layers)
    return found, [*_other_facts(capsule), *(f"{name} is {value!r} here" for name, value in changes.items())]


def weights_of(capsule: Capsule, name: str, given: Path | None) -> Path | None:
    """The directory of the "model" or of the "checkpoint"; None for no checkpoint. Raises ValueError for another."""
    if not capsule.weights[name]:
        if given is not None:
            raise ValueError(f"--{name} is {given}; the capsule has none")
        return None
    path, wanted = given or Path(capsule.weights[name]), capsule.weights[f"{name}_digest"]
    if not path.is_dir():
        raise ValueError(f"the {name} of the capsule is not at {path}; --{name} DIR says where it is")
    if wanted and (found := digest_of(path)) != wanted:
        raise ValueError(f"{path} has the digest {found[:12]}, and the capsule's {name} {wanted[:12]}: other weights")
    return path


def _other_facts(capsule: Capsule) -> Iterator[str]:
    """What differs here from where the capsule was made."""
    here = facts_here()
    for name, value in {**capsule.facts["made"]["versions"]}.items():
        if here["versions"][name] != value:
            yield f"{name} is {here['versions'][name]} here, and was {value}"
    for name in ("processor", "device"):
        if here[name] != capsule.facts["made"][name]:
            yield f"the {name} is {here[name]} here, and was {capsule.facts['made'][name]}"
    if source_of(capsule.loss) != capsule.facts["loss_source"]:
        yield f"the source of the loss {capsule.loss} has changed"


def verdict(capsule: Capsule, found: Computation, others: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether a replay is equal but for rounding, and sentences that say so."""
    apart = capsule.computed.differences(found)
    count = len(capsule.computed.values)
    lines = [*others]
    if fault := found.first_fault():
        lines.append(f"not finite, and first so: {fault}")
    if not apart:
        return True, [*lines, f"equal: all {count} values, to the last bit"]
    limit = ROUNDING[str(capsule.trainer["compute_dtype"])]
    worst = max(apart, key=lambda name: apart[name])
    if apart[worst] <= limit:
        return True, [
            *lines,
            f"equal but for rounding: {len(apart)} of {count} values, at most by {apart[worst]:.1e} ({worst})",
        ]
    beyond = {name: value for name, value in apart.items() if value > limit}
    told = [f"  {name}: {_norms(capsule, found, name)}, apart by {value:.1e}" for name, value in beyond.items()]
    lines.append(f"differs: {len(beyond)} of {count} values by more than rounding, first {next(iter(beyond))}")
    return False, [*lines, *told[:_MOST_TOLD]]


def _norms(capsule: Capsule, found: Computation, name: str) -> str:
    return f"norm {capsule.computed.values[name].norm:.6g} in the capsule, {found.values[name].norm:.6g} here"
