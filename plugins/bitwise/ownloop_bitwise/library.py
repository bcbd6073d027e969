"""Builds the kernels once for a processor and a compiler, and loads them. Imports no torch.

The library lies in ownloop's cache folder. Trainer and generator of a host load the same file.
"""

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from rl.system.disk import cache_directory
from rl.system.hardware import cpu_features

_L, _P, _I, _F = ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_float
_SIGNATURES: Mapping[str, tuple[Sequence[type], type | None]] = {
    "packed_bytes": ([_L, _L, _I], _L),
    "pack": ([_P, _P, _L, _L, _I], None),
    "product": ([_P, _P, _P, _P, _L, _L, _L, _I], None),
    "attend": ([_P] * 9 + [_L] * 7 + [_F, _F, _I], None),
    "rms_norm": ([_P, _P, _P, _L, _L, _F, _F, _I], None),
    "gate_mul": ([_P, _P, _P, _L, _L, _L, _I, _I], None),
    "soft_cap": ([_P, _P, _L, _F, _I], None),
    "rotate": ([_P, _P, _P, _P, _L, _L, _L, _L, _I, _I], None),
    "log_sum_exp": ([_P] * 6 + [_L, _I], None),
    "nucleus": ([_P] * 4 + [_L] * 2, None),
}
_SOURCE = Path(__file__).with_name("kernels.c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mtune=native")
_FLAGS: Mapping[str, Sequence[str]] = {
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma", "-mtune=native"),
    "neon": (),
    "plain": (),
}
"""Instruction set -> options of the compiler. "plain" is for tests, and slow.

All give the same bits, but for bfloat16 products with "avx512_bf16".
"""
_NEEDS = {"avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"}, "avx2": {"avx2", "fma"}}
_CAP = "ONEDNN_MAX_CPU_ISA"
_CAPS_BELOW_BFLOAT16 = ("AVX512_CORE", "AVX512_CORE_VNNI")
_COMMON = ("-O3", "-std=gnu11", "-fPIC", "-ffp-contract=off", "-fno-math-errno")
_COMPILERS = ("gcc", "cc", "clang")


def instruction_set() -> str:
    """The widest that this processor has, or that ONEDNN_MAX_CPU_ISA leaves. Raises ValueError if there is none."""
    if platform.machine() in ("aarch64", "arm64"):
        return "neon"
    features, cap = cpu_features(), os.environ.get(_CAP, "").upper()
    if _NEEDS["avx512"] <= features and not cap.startswith("AVX2"):
        return "avx512_bf16" if "avx512_bf16" in features and cap not in _CAPS_BELOW_BFLOAT16 else "avx512"
    if _NEEDS["avx2"] <= features:
        return "avx2"
    raise ValueError(
        f"numerics is 'bitwise', which needs a processor with AVX2 and FMA, AVX-512, or aarch64; this is "
        f"{platform.machine()} without them"
    )


def bfloat16_path() -> str:
    """How this process multiplies bfloat16. Processes with different paths have different bits."""
    return "pairs (vdpbf16ps)" if instruction_set() == "avx512_bf16" else "single products"


def check_one_path(places: Mapping[str, str]) -> None:
    """Raises ValueError unless all processes of a run have one path. `places` are the paths by role and host."""
    if len({*places.values()}) > 1:
        found = " and ".join(f"by {path} in {place}" for place, path in places.items())
        if any(path.startswith("compute capability") for path in places.values()):
            raise ValueError(
                f"numerics is 'bitwise', and products are computed {found}, whose bits differ; give trainer and "
                "generator GPUs of one kind"
            )
        raise ValueError(
            f"numerics is 'bitwise', and bfloat16 is multiplied {found}, whose bits differ; set "
            f"{_CAP}={_CAPS_BELOW_BFLOAT16[0]} in the environment of all hosts, or take dtype 'float32'"
        )


def find_compiler() -> str:
    """The C compiler: $CC, or the first of gcc, cc and clang. Raises ValueError if there is none."""
    names = [os.environ["CC"]] if os.environ.get("CC") else _COMPILERS
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise ValueError(
            f"numerics is 'bitwise', which compiles its kernels once, and there is no C compiler: looked for "
            f"{', '.join(names)}; install gcc or clang, or name one in CC"
        )
    return found


def build(instructions: str, folder: Path | None = None) -> Path:
    """The library of these instructions, compiled if it is not in the folder yet. The default is the cache folder.

    Raises ValueError, with the compiler's last lines, if it cannot be compiled.
    """
    compiler = find_compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    flags = [*_COMMON, *_FLAGS[instructions]]
    key = hashlib.sha256("\0".join([_SOURCE.read_text(), version, *flags, str(_openmp())]).encode()).hexdigest()[:16]
    folder = cache_directory() / "bitwise" if folder is None else folder
    library = folder / f"kernels-{instructions}-{key}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several ranks start at once, and one of them compiles
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as made:
                _compile(compiler, flags, Path(made) / "kernels.so").rename(library)
    return library


def _compile(compiler: str, flags: Sequence[str], library: Path) -> Path:
    """Compiles with OpenMP on torch's own threads, or without threads where the compiler cannot."""
    of_object, openmp = str(library.with_suffix(".o")), _openmp()
    tries = [["-fopenmp"], []] if openmp is not None else [[]]
    failed = ""
    for threads in tries:
        linked = [str(openmp)] if threads else []
        steps = [
            [compiler, *flags, *threads, "-c", str(_SOURCE), "-o", of_object],
            # A second OpenMP beside torch's would have threads of its own, which wait in a loop for the first one's.
            [compiler, "-shared", of_object, *linked, "-lm", "-o", str(library)],
        ]
        done = [subprocess.run(step, capture_output=True, text=True, check=False) for step in steps]
        if all(each.returncode == 0 for each in done) and _loads(library):
            return library
        failed = "".join(each.stderr for each in done)
    raise ValueError(f"numerics is 'bitwise', and {compiler} cannot compile its kernels: {failed.strip()[-1000:]}")


def _loads(library: Path) -> bool:
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


def _openmp() -> Path | None:
    """The OpenMP that torch brings."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    torch = Path(spec.origin).parent
    found = [*torch.glob("lib/libgomp*.so*"), *torch.parent.glob("torch.libs/libgomp*.so*")]
    return found[0] if found else None


def load(instructions: str, folder: Path | None = None) -> ctypes.CDLL:
    """The library of these instructions with its functions' types."""
    library = ctypes.CDLL(str(build(instructions, folder)))
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


@cache
def kernels() -> ctypes.CDLL:
    """The library of this processor."""
    return load(instruction_set())
