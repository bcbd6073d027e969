"""`make gpu-rehearsal`: what runs on pretended GPUs, part after part, as a table.

    python -m tests.gpu_pretended.rehearsal [--only PART ...] [--page FILE]

Each part is a process of the environment `.venv-pretended-gpu`, which `make setup DEVICE=pretended-gpu` makes. The page
begins with what the rehearsal cannot show, and keeps the rows of parts that are not run. Exits with 1 if a part has
failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu_pretended.pretended import PYTHON, Mode, environment

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "RESULTS-pretended-gpu.md"
COVERS_NOT = """# Results on pretended GPUs

**Not covered:** speed; races between streams; NCCL and vLLM's own all-reduces, for which gloo and sockets stand in;
what the kernels of cuBLAS, FlashAttention, FlexAttention, Triton and vLLM compute, for which plain operators stand in
or nothing does; rounding of tensor cores; CUDA graphs. A green table says that no device or dtype is mixed up, that
memory is freed, shared and counted by torch's own CUDA build, and that the numbers are the CPU's. Where there is a real
GPU, `make gpu-check` comes first.
"""
COUNTED = """## Kernels, and the host's time of a push

Printed by `python -m tests.gpu_pretended.launches` in the mode `kernels`, which the part `launches` runs: 310 tensors,
as many as a Qwen3-1.7B has, on two cores of an AMD EPYC, the two commits in turns, medians of three runs each.

| | kernels of an optimizer step | kernels of a push | a push, milliseconds of the host |
|---|---|---|---|
| every push makes its views anew (cadacdae) | 14 | 7 | 1.36 |
| views of the buffers are kept, nothing of the parameters | 14 | 7 | 0.44 |
"""
_PYTEST = ("-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--show-capture=no", "--disable-warnings")
_ENGINES = "tests/trainer/engines"
_LAYOUTS = (
    *("fsdp2_tied", "tp2_tied", "pp2_untied", "ep2_moe", "cp2_tp2_untied", "hsdp2x2_untied", "adapter_fsdp2_tied"),
    *("transformers_fsdp2_tied", "fsdp1_tied", "megatron_sharded2_tied", "megatron_tp2_tied"),
)
_INTERPRETED = {"TRITON_INTERPRET": "1"}
_TWO_GPUS = {
    **_INTERPRETED,
    "VLLM_DISABLE_PYNCCL": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
"""For a generator with tensor parallelism."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process."""

    name: str
    what: str
    """Its result, as a sentence."""
    arguments: tuple[str, ...]
    mode: Mode = "computed"
    gpus: int = 1
    gib: float = 80.0
    """Memory of each. What a generator takes for keys is touched, and is the host's."""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    limit_s: float = 600.0


PARTS = (
    Part(
        "gpu_tests",
        "Tests marked `gpu` pass: kernels' choices, pinned offload of every engine, calls that run out of memory, CUDA "
        "IPC with another process until it dies, pairs of NCCL between a process and two that pass on.",
        (*_PYTEST, "-m", "gpu", _ENGINES, "tests/rl/weights", "plugins/hosts/tests/weights"),
    ),
    Part(
        "numerics",
        "Losses, gradient norms and checkpoints of torchtitan and fsdp2 are the CPU's.",
        ("-m", "benchmarks.gpu.numerics", "--smoke"),
    ),
    Part(
        "layouts",
        "Two ranks under FSDP2, tensor, pipeline or expert parallelism, or with an adapter under FSDP2, and four under "
        "context and tensor parallelism, or two copies of two shards, keep the contract of engines: gradients, steps, "
        "failures, checkpoints that one rank loads, exports, pushes. Their state leaves the GPU and comes back. So do "
        "two ranks of fsdp2, fsdp1 and megatron_fsdp, and of megatron, which share data or layers.",
        (
            *(*_PYTEST, "plugins/doctors/tests/test_sharded_engine.py"),
            *("plugins/megatron/tests/test_megatron_fsdp.py", "-k"),
            "several_ranks_keep_the_contract and (" + " or ".join(f"[{name}-" for name in _LAYOUTS) + ")"
            " or two_ranks_compute and [tied-",
        ),
        gpus=4,
    ),
    Part(
        "resharding",
        "Training goes on from one rank to a pipeline and back, to FSDP2 and on to tensor parallelism; adapters of "
        "several kinds, interleaved, compute on two ranks what they do on one.",
        (*_PYTEST, f"{_ENGINES}/test_changed_layouts.py", f"{_ENGINES}/test_sharded_adapters.py"),
        gpus=2,
    ),
    Part(
        "failures",
        "One of two ranks runs out of memory: for a step or a push, it raises and nothing is lost; in a forward or a "
        "backward pass, one error names rank and cause, and a new trainer starts. A rank dies whose memory a generator "
        "has open: the next trainer's weights reach it.",
        (*_PYTEST, "tests/e2e/test_gpu_failures.py"),
        gpus=3,
        gib=2.0,
        variables=_INTERPRETED,
    ),
    Part(
        "compiled",
        "`compile=True` makes no graph for a new length of a row, with and without shared prefixes, and breaks none; "
        "attention that is compiled alone makes one graph for all lengths.",
        ("-m", "tests.gpu_pretended.compiled"),
        mode="kernels",
    ),
    Part(
        "launches",
        "No tensor has kernels of its own in an optimizer step (norm, scale and AdamW) or a push.",
        ("-m", "tests.gpu_pretended.launches"),
        mode="kernels",
    ),
    Part(
        "weights",
        "A push and pulls between two processes over CUDA IPC bring the weights.",
        ("-m", "benchmarks.gpu.weights", "--smoke"),
        gpus=2,
    ),
    Part(
        "nccl",
        "Between two hosts of a run, weights go from the trainer's GPU to one of the generator's host, through sockets "
        "in place of NCCL; the receiving process dies, and its successor gets new communicators.",
        (*_PYTEST, "-m", "gpu", "plugins/hosts/tests/test_weights_between_hosts.py"),
        gpus=2,
        gib=2.0,
        variables=_INTERPRETED,
    ),
    Part(
        "generator",
        "vLLM's GPU worker (V2 runner, asynchronous scheduling) samples what transformers computes with each version's "
        "weights, from cut distributions too: after pulls in flight and drained from another process over CUDA IPC, an "
        "abort, sleep and waking up.",
        ("-m", "tests.gpu_pretended.generator"),
        gib=2.0,
        variables=_INTERPRETED,
    ),
    Part(
        "generator_tp2",
        "The same with every layer on two GPUs, one process each (tensor parallelism).",
        ("-m", "tests.gpu_pretended.generator", "2"),
        gpus=2,
        gib=2.0,
        variables=_TWO_GPUS,
    ),
    Part(
        "adapters",
        "As `generator`, with two adapters and the model itself in every batch, prompts scored beside them, an adapter "
        "pulled again in flight, and another model under them.",
        ("-m", "tests.gpu_pretended.adapters"),
        gib=2.0,
        variables=_INTERPRETED,
    ),
    Part(
        "adapters_mixture",
        "Adapters of attention and of the output projection over a mixture of experts, and over another one.",
        ("-m", "tests.gpu_pretended.adapters", "mixture"),
        gib=2.0,
        variables=_INTERPRETED,
    ),
    Part(
        "bitwise",
        "With numerics 'bitwise', in Triton's interpreter, a row of every operation has equal bits alone and among "
        "others, in pages and packed; log-probs of the generator's tokens are the trainer's bits, from cuts too.",
        (*_PYTEST, "-m", "gpu", "plugins/bitwise/tests/test_cuda.py"),
        gib=2.0,
        variables=_INTERPRETED,
        limit_s=1200.0,
    ),
    Part(
        "bitwise_run",
        "`ownloop run --numerics bitwise` with FSDP 2 and two generators: a mismatch of 0.0 in each of three steps.",
        ("-m", "tests.gpu_pretended.whole_runs", "bitwise"),
        gpus=4,
        gib=1.0,
        variables=_INTERPRETED,
        limit_s=1200.0,
    ),
    Part(
        "colocated",
        "`ownloop run` trains a mixture on two GPUs, whose memory two ranks under FSDP2 and two generators have in "
        "turns; after every push from GPU to GPU the generators' log-probs are the trainer's.",
        ("-m", "tests.gpu_pretended.whole_runs", "colocated"),
        gpus=2,
        gib=1.0,
        variables=_INTERPRETED,
    ),
    Part(
        "whole_runs",
        "`ownloop run` learns and agrees with its generators with FSDP 2, and FSDP 2 x TP 2, pushing to one and to two "
        "generators of TP 2; with HSDP 2 x 2 and EP 2 over a mixture to TP 2; with PP 2 x FSDP 2; and with FSDP 8. A "
        "rank that is killed after a step costs a restart.",
        (
            *("-m", "tests.gpu_pretended.whole_runs", "fsdp2_tp2", "fsdp2xtp2_2xtp2", "hsdp2x2_ep2_tp2"),
            *("pp2xfsdp2", "fsdp8", "restart"),
        ),
        gpus=9,
        gib=1.0,
        variables=_TWO_GPUS,
        limit_s=1800.0,
    ),
)


def run_part(part: Part, table: Path) -> tuple[str, float, str]:
    """Outcome, seconds, and the last line that it printed. A part that outlives its limit ends with its processes."""
    began = time.monotonic()
    process = subprocess.Popen(
        [str(PYTHON), *part.arguments],
        cwd=ROOT,
        env={**environment(part.mode, gpus=part.gpus, gib=part.gib, table=table), **part.variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=part.limit_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return "failed", time.monotonic() - began, f"did not end within {part.limit_s:g} s"
    print(output, flush=True)
    last = output.strip().rpartition("\n")[2]
    passed = process.returncode == 0 and _bars_hold(last)
    return "passed" if passed else "failed", time.monotonic() - began, last if not last.startswith("{") else ""


def _bars_hold(line: str) -> bool:
    """Whether no bar of a benchmark is missed but for those of time, which mean nothing here."""
    if not line.startswith("{"):
        return True
    return all(bar["ok"] or bar["name"] == "ratio_to_copy" for bar in json.loads(line).get("bars", ()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts and writes the page after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    if not PYTHON.exists():
        parser.error("there is no .venv-pretended-gpu; run make setup DEVICE=pretended-gpu")
    head = [COVERS_NOT, "## Parts\n", "| part | outcome | seconds | what it shows |", "|---|---|---|---|"]
    page = options.page.read_text().splitlines() if options.page.exists() else []
    rows = {name: line for line in page for name in names if line.startswith(f"| {name} |")}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for part in (part for part in PARTS if part.name in options.only):
            outcome, seconds, said = run_part(part, Path(folder) / "table")
            failed |= outcome == "failed"
            rows[part.name] = f"| {part.name} | {outcome} | {seconds:.0f} | {part.what} |"
            print(f"{part.name}: {outcome} in {seconds:.0f} s {said}", flush=True)
            options.page.write_text("\n".join([*head, *(rows[name] for name in names if name in rows), "", COUNTED]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
