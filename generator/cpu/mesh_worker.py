"""The vLLM worker of a tensor-parallel group on the CPU; vLLM imports `CPUMeshWorker` by its dotted name."""

import os
from pathlib import Path

from vllm.v1.worker.cpu_worker import CPUWorker


class CPUMeshWorker(CPUWorker):
    """A CPU worker whose process vLLM did not start itself (here Monarch did).

    With `external_launcher`, vLLM 0.32 names its shared memory after the last part of the rendezvous address "env://".
    This name is the same for every group on the host, and remains taken after a kill ("create shm in SHMManager failed.
    errno: 17"). An address with a port gives each group a name of its own. Ranks on several hosts, which share no
    memory, get different names: then vLLM has them talk through gloo.

    vLLM removes the memory's names only in a process that ends in good order, 4 MiB for each rank and group. Once all
    ranks have mapped the memory the names are of no more use, so they are removed then, and the kernel frees the memory
    however the processes end.

    Remove when vLLM derives the name from MASTER_PORT and unlinks it.
    """

    def init_device(self) -> None:
        """Sets the rendezvous address, from which vLLM derives the name, and removes the name afterwards."""
        self.distributed_init_method = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
            self.distributed_init_method += f"?host={os.environ['GROUP_RANK']}"
        super().init_device()
        for shared_memory in Path("/dev/shm").glob(f"{os.environ['MASTER_PORT']}-*-cpushm_*"):
            shared_memory.unlink(missing_ok=True)  # another rank may be faster
