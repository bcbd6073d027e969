"""Every engine on this machine's device against the CPU: losses, gradient norms, and a checkpoint there and back.

    python -m benchmarks.gpu.numerics [--smoke] [--only CASE ...]

Three steps of cross-entropy over the same batch, also over prompts that share tokens, and with the optimizer's state on
the host. The reference is the same engine in float32, in a process that sees no
GPU. bfloat16 may differ from it by its own rounding; float32 only by the order of sums. A checkpoint written on the
device is then read on the CPU, where it has to give the same log-probs.
"""

import dataclasses
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.harness import Bar, parser, print_result

LENGTHS = (33, 96, 128, 7, 64, 120, 81, 50)
STEPS = 3
LOSS_LIMIT = {"bfloat16": 1e-3, "float32": 1e-5}
NORM_LIMIT = {"bfloat16": 2e-2, "float32": 1e-4}
"""Largest relative differences."""
LOOSER = {"float8": 10.0, "qwen3_moe": 3.0}
"""Factors: three bits of mantissa; in bfloat16, a token whose best experts are nearly equal may get another one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One engine over one model, computing in one way."""

    engine: str
    family: str
    dtype: str
    options: tuple[tuple[str, Any], ...] = ()
    """Further fields of `TrainerConfig`."""
    way: Literal["", "shared_prefixes", "offloaded"] = ""
    """What differs from plain steps: the batch's prompts share tokens, or AdamW's moments are kept on the host."""

    @property
    def reference(self) -> "Case":
        """What it is compared with on the CPU."""
        return Case(self.engine, self.family, "float32", way="shared_prefixes" if self.way == "shared_prefixes" else "")

    def __str__(self) -> str:
        """The name of this variant in the bars."""
        names = [self.engine, self.family, self.dtype, *(f"{name}" for name, _ in self.options), self.way]
        return "_".join(filter(None, names))


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What three steps gave."""

    losses: tuple[float, ...]
    """Per token."""
    norms: tuple[float, ...]
    logprobs: tuple[np.ndarray, ...]
    """The log-probs of every datum after the last step."""


def cases(*, gpu: bool) -> list[Case]:
    """All that this machine can compute."""
    import torch

    found = [
        Case(engine, family, dtype)
        for engine, families in (("torchtitan", ("llama", "qwen3", "qwen3_moe")), ("fsdp2", ("llama", "qwen3")))
        for family in families
        for dtype in ("float32", "bfloat16")
    ]
    for dtype in ("float32", "bfloat16"):
        found.append(Case("torchtitan", "llama", dtype, way="shared_prefixes"))
    found.append(Case("torchtitan", "llama", "float32", way="offloaded"))
    if gpu:
        found.append(Case("torchtitan", "qwen3", "bfloat16", (("compile", True),)))
        found.append(Case("torchtitan", "qwen3", "bfloat16", (("activation_checkpointing", "full"),)))
        if torch.cuda.get_device_capability() >= (8, 9):
            found.append(Case("torchtitan", "qwen3", "bfloat16", (("float8", "rowwise"),)))
    return found


def make_models(folder: Path) -> dict[str, Path]:
    """A small model of each family, with heads that every attention kernel accepts."""
    from rl.tiny_models import tiny_llama, tiny_qwen3, tiny_qwen3_moe

    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}
    return {
        "llama": tiny_llama(folder / "llama", **shape),
        "qwen3": tiny_qwen3(folder / "qwen3", **shape),
        "qwen3_moe": tiny_qwen3_moe(folder / "qwen3_moe", **shape, moe_intermediate_size=128),
    }


def compute(case: Case, model: Path, save: Path | None = None, load: Path | None = None) -> Result:
    """Three steps, in this process, on the device that it sees. With `load`, none: the log-probs of a checkpoint."""
    from rl.losses import get_loss
    from rl.tiny_models import random_batch
    from rl.types import AdamParams
    from trainer.config import TrainerConfig
    from trainer.engines import load_engine
    from trainer.engines.contract.reference import random_groups

    fields: dict[str, Any] = {"model": model, "engine": case.engine, "compute_dtype": case.dtype, **dict(case.options)}
    engine = load_engine(TrainerConfig(**fields, max_tokens_per_microbatch=512))
    groups = random_groups([(40, (30, 20, 40)), (23, (20,)), (30, (44, 31))], opening=24)
    batch = groups if case.way == "shared_prefixes" else random_batch(LENGTHS)
    if case.way == "offloaded":
        engine.to("cpu", optimizer=True)
    microbatches, loss = [batch[:4], batch[4:]], get_loss("cross_entropy")
    losses: list[float] = []
    norms: list[float] = []
    if load is not None:
        engine.load_checkpoint(load)
    else:
        for _ in range(STEPS):
            metrics = engine.forward_backward(microbatches, loss).metrics
            losses.append(metrics["loss"] / metrics["num_loss_tokens"])
            step = engine.optim_step(AdamParams(learning_rate=1e-4), grad_scale=1 / metrics["num_loss_tokens"])
            norms.append(step.grad_norm)
    logprobs = tuple(np.asarray(each) for each in engine.forward(microbatches).logprobs)
    if save is not None:
        engine.save_checkpoint(save)
    return Result(tuple(losses), tuple(norms), logprobs)


def on_cpu(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The results of these calls in a process that sees no GPU."""
    hidden, os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES"), ""
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.starmap(function, calls)
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if hidden is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = hidden


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference."""
    return float(np.max(np.abs(np.subtract(ours, theirs)) / np.abs(theirs)))


def compared(case: Case, result: Result, reference: Result) -> list[Bar]:
    """Losses and gradient norms against the CPU's."""
    loose = LOOSER["float8"] if "float8" in dict(case.options) else 1.0
    if case.dtype == "bfloat16":
        loose = max(loose, LOOSER.get(case.family, 1.0))
    return [
        Bar(name=f"{name}_{case}", value=difference(ours, theirs), limit=loose * limits[case.dtype])
        for name, ours, theirs, limits in (
            ("loss", result.losses, reference.losses, LOSS_LIMIT),
            ("norm", result.norms, reference.norms, NORM_LIMIT),
        )
    ]


def main() -> None:
    """Runs the comparisons and prints the result."""
    import torch

    gpu = torch.cuda.is_available()
    names = {str(case): case for case in cases(gpu=gpu)}
    options_parser = parser(__doc__, quick="as without")
    options_parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=", ".join(names))
    options = options_parser.parse_args()
    found = [names[name] for name in options.only or names]
    if options.smoke and not options.only:
        found = [case for case in found if case.family == "llama"]
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder))
        kinds = list(dict.fromkeys(case.reference for case in found))
        references = dict(zip(kinds, on_cpu(compute, [(kind, models[kind.family]) for kind in kinds]), strict=True))
        saved: list[tuple[Case, Path, None, Path]] = []
        results: list[Result] = []
        for case in found:
            path = Path(folder) / str(case)
            try:
                result = compute(case, models[case.family], path if case.dtype == "float32" else None)
            except Exception:  # the other cases are compared all the same
                traceback.print_exc()
                bars.append(Bar(name=f"error_{case}", value=1.0, limit=0.0))
                continue
            if case.dtype == "float32":
                saved.append((case, models[case.family], None, path))
                results.append(result)
            reference = references[case.reference]
            bars += compared(case, result, reference)
            print(f"{case}: losses {result.losses}, on the CPU {reference.losses}", flush=True)
        for (case, *_), result, read in zip(saved, results, on_cpu(compute, saved), strict=True):
            worst = max(float(np.abs(a - b).max()) for a, b in zip(result.logprobs, read.logprobs, strict=True))
            bars.append(Bar(name=f"checkpoint_{case}", value=worst, limit=1e-3))
    print_result("gpu_numerics", bars, {"device": torch.cuda.get_device_name() if gpu else "cpu", "cases": len(found)})


if __name__ == "__main__":
    main()
