"""Compiles the pretended GPU for an environment that has torch's CUDA build: `python -m tests.gpu_pretended.build`.

    .venv-pretended-gpu/pretended-gpu/computed/   runtime, driver, pairs of NCCL: device.py computes what kernels would
    .venv-pretended-gpu/pretended-gpu/empty/      cuBLAS, cuDNN, NCCL and others as well, which do nothing

`set-up` runs it. It needs a C compiler and nvidia's headers, which are in the wheels that torch requires.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / ".venv-pretended-gpu"
LIBRARIES = ENVIRONMENT / "pretended-gpu"
_STUBBED = re.compile(r"cublas|cusparse|cusolver|nccl|cudnn")
_MAKES_A_HANDLE = re.compile(r"(Create|Create_v2|InitRank.*|CommInitAll|CommSplit)$")
_SPECIAL = {
    "cublasLtMatmulAlgoGetHeuristic": (
        "int {}(void *a, void *b, void *c, void *d, void *e, void *f, void *g, int n, char *result, int *found) "
        "{{ for (int i = 0; i < 96; i++) result[i] = 0; return *found = 1, 0; }}"
    ),
    "ncclGetVersion": "int {}(int *version) {{ return *version = 22907, 0; }}",
    "ncclCommGetAsyncError": "int {}(void *comm, int *error) {{ return *error = 0; }}",
    "cudnnGetVersion": "unsigned long {}(void) {{ return 92000; }}",
    **dict.fromkeys(
        ("ncclGetErrorString", "ncclGetLastError", "cublasGetStatusString", "cudnnGetErrorString"),
        'const char *{}(void) {{ return "of a library that does nothing"; }}',
    ),
}


def packages() -> Path:
    """Where the environment keeps its packages."""
    return next((ENVIRONMENT / "lib").glob("python3*/site-packages"))


def stubs() -> Iterator[str]:
    """C code of every function of NVIDIA's libraries that torch and vLLM link to. Each succeeds and does nothing."""
    libraries = [
        path
        for pattern in (
            "torch/lib/libtorch_cuda*.so",
            "torch/lib/libtorch_python.so",
            "vllm/*.so",
            "vllm/vllm_flash_attn/*.so",
        )
        for path in packages().glob(pattern)
    ]
    command = ["nm", "-D", "--undefined-only", *map(str, libraries)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = {line.split()[-1].partition("@")[0] for line in lines if line.startswith(" ")}
    for name in sorted(filter(_STUBBED.match, names)):
        if name in _SPECIAL:
            yield _SPECIAL[name].format(name)
        elif _MAKES_A_HANDLE.search(name):  # the first argument is where it goes
            yield f"int {name}(void **made) {{ static char room[4096]; if (made) *made = room; return 0; }}"
        else:
            yield f"int {name}(void) {{ return 0; }}"


def compile_library(target: Path, *sources: Path) -> None:
    """One shared library of these C files."""
    headers = packages() / "nvidia" / "cu13" / "include"
    flags = ["-std=gnu2x", "-O1", "-w", "-shared", "-fPIC", f"-I{headers}", f"-Wl,-soname,{target.name}"]
    subprocess.run(["cc", *flags, "-o", str(target), *map(str, sources), "-ldl", "-lpthread"], check=True)


def main() -> None:
    """Compiles both variants."""
    for variant in ("computed", "empty"):
        folder = LIBRARIES / variant
        folder.mkdir(parents=True, exist_ok=True)
        own = HERE / "nccl.c" if variant == "computed" else folder / "stubs.c"
        if variant == "empty":
            own.write_text("\n".join(stubs()))
        compile_library(folder / "libcuda.so.1", HERE / "runtime.c", own)
        compile_library(folder / "libnvidia-ml.so.1", HERE / "management.c")


if __name__ == "__main__":
    main()
