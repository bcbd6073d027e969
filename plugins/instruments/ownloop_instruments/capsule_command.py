"""`ownloop capsule`: makes a capsule of a run's step, and replays one."""

import atexit
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from controller.commands.command import OfRuns
from controller.commands.command_line import FAILED
from controller.commands.output import CapturedOutput

if TYPE_CHECKING:
    from ownloop_instruments.capsule import Capsule

_SUFFIX = ".capsule"
_MOST_DATUMS = 8


@dataclass(frozen=True, kw_only=True)
class CapsuleCommand(OfRuns):
    """Keeps one micro-batch of a run's step in a file, or computes such a file again."""

    source: Annotated[str, Positional, arg(metavar="RUN|FILE.capsule")]
    """A run's folder, or its name within --runs; or a capsule to replay."""
    step: int | None = None
    """Of a run: the step."""
    datum: int | None = None
    """Of a run: the datum whose micro-batch is kept. The default is the first micro-batch with a number that is not
    finite, or else the one with the largest gradient."""
    layers: bool = False
    """Of a run: keep the inputs and outputs of every module, in a few numbers each."""
    from_layer: int | None = None
    """Of a run: keep the input of this layer, from 0, and the weights from there on in the file. A replay then needs no
    model and begins at the layer."""
    nearest: bool = False
    """Of a run: use the newest checkpoint before the step, if it is not that of the step before."""
    out: Annotated[Path | None, arg(metavar="FILE.capsule")] = None
    """Of a run: the file to write. The default is RUN-step-N.capsule here."""
    model: Annotated[Path | None, arg(metavar="DIR")] = None
    """Of a capsule: where the model's directory is."""
    checkpoint: Annotated[Path | None, arg(metavar="DIR")] = None
    """Of a capsule: where the checkpoint is, if it names one."""
    engine: str = ""
    """Of a capsule: another engine to compute with."""
    compute_dtype: str = ""
    """Of a capsule: another dtype to compute in."""

    def __post_init__(self) -> None:
        """Raises ValueError for options that are for the other use."""
        of_run = {"--step": self.step is not None, "--datum": self.datum is not None, "--layers": self.layers,
                  "--from-layer": self.from_layer is not None, "--nearest": self.nearest,
                  "--out": self.out is not None}  # fmt: skip
        of_file = {"--model": self.model is not None, "--checkpoint": self.checkpoint is not None,
                   "--engine": bool(self.engine), "--compute-dtype": bool(self.compute_dtype)}  # fmt: skip
        is_file = self.source.endswith(_SUFFIX)
        for option, given in (of_run if is_file else of_file).items():
            if given:
                kinds = ("a run", "a capsule")
                raise ValueError(f"{option} is for {kinds[not is_file]}, and {self.source} is {kinds[is_file]}")
        if not is_file and self.step is None:
            raise ValueError("--step is missing: the step of the run")
        if self.out is not None and self.out.suffix != _SUFFIX:
            raise ValueError(f"--out is {self.out}; the file's name must end in {_SUFFIX}")

    def run(self) -> int:
        """Prints what the file holds, or what differs. Returns 1 if a replay differs by more than rounding."""
        with CapturedOutput() as output:
            equal = True
            if self.source.endswith(_SUFFIX):
                equal, lines = self._replayed()
            else:
                lines = self._made()
            for line in lines:
                print(line, file=output.terminal)
        return 0 if equal else FAILED

    def _replayed(self) -> tuple[bool, list[str]]:
        # Looking for garbage among what the imports make, now and at the interpreter's end, is a third of a replay.
        gc.disable()
        atexit.register(gc.freeze)
        try:
            from ownloop_instruments.capsule import read_capsule, replay, verdict

            capsule = read_capsule(Path(self.source))
            changes = {name: getattr(self, name) for name in ("engine", "compute_dtype") if getattr(self, name)}
            found, others = replay(capsule, self.model, self.checkpoint, **changes)
            equal, lines = verdict(capsule, found, others)
        finally:
            gc.enable()
        return equal, [_described(capsule), *lines]

    def _made(self) -> Iterator[str]:
        from controller.commands.saved_recipe import find_run
        from ownloop_instruments.capsule import write_capsule
        from ownloop_instruments.step import microbatches_of, whole_step

        assert self.step is not None
        run = find_run(self.source, self.runs)
        step = microbatches_of(run, self.step, nearest=self.nearest)
        if self.datum is None:
            yield from whole_step(step)
        number = step.chosen if self.datum is None else step.number_of(self.datum)
        capsule = step.capsule(number, layers=self.layers, from_layer=self.from_layer)
        file = self.out or Path(f"{run.name}-step-{self.step}{_SUFFIX}")
        write_capsule(capsule, file)
        yield _described(capsule)
        if fault := capsule.computed.first_fault():
            yield f"not finite, and first so: {fault}"
        yield f"written to {file}, {file.stat().st_size / 1e6:.2f} MB; weights: {_weights(capsule)}"


def _described(capsule: "Capsule") -> str:
    facts: dict[str, Any] = {**capsule.facts}
    computed = capsule.computed
    named = [str(datum) for datum in facts["datums"]]
    datums = ", ".join([*named[:_MOST_DATUMS], *(["..."] if named[_MOST_DATUMS:] else [])])
    norm = "not finite" if not math.isfinite(computed.grad_norm) else f"{computed.grad_norm:.6g}"
    return (
        f"step {facts['step']} of {facts['run']}, micro-batch {facts['microbatch']} of rank {facts['rank']}: "
        f"datums {datums}, loss {computed.loss:.6g}, gradient norm {norm}"
    )


def _weights(capsule: "Capsule") -> str:
    if capsule.cut is not None:
        return f"in the file, from layer {capsule.cut.layer} on"
    name = "checkpoint" if capsule.weights["checkpoint"] else "model"
    return f"{name} {capsule.weights[name]}, sha256 {capsule.weights[f'{name}_digest'][:12]}"
