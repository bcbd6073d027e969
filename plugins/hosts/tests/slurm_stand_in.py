"""A Slurm of one folder: sbatch, srun, squeue, scontrol and scancel, for tests. Its nodes run what they are given.

    python -m plugins.hosts.tests.slurm_stand_in PROGRAM ARGUMENT ...

`$STAND_INS/nodes` lists the nodes, `$STAND_INS/pending` says how often squeue finds a job pending; with
`$STAND_INS/busy` it fails once; `$STAND_INS/job-N.over` is the state in which job N has ended. A node is this
machine, unless a `node_server` listens there; then its commands run behind that.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from plugins.hosts.tests.node_server import PORT, run_there

FOLDER = Path(os.environ.get("STAND_INS", "."))
PROGRAMS = ("sbatch", "srun", "squeue", "scontrol", "scancel")


def scripts() -> dict[str, str]:
    """For `plugins.hosts.tests.stand_ins.install`."""
    module = "plugins.hosts.tests.slurm_stand_in"
    return {name: f'exec {sys.executable} -m {module} {name} "$@"' for name in PROGRAMS}


def sbatch(*_: str) -> int:
    """Notes the script. squeue starts it."""
    script = sys.stdin.read()
    if "--partition=closed" in script:
        print("sbatch: error: invalid partition specified: closed", file=sys.stderr)
        return 1
    job = FOLDER / f"job-{1 + len(list(FOLDER.glob('job-*.sh')))}"
    job.with_suffix(".sh").write_text(script)
    print(job.name.removeprefix("job-"))
    return 0


def squeue(*arguments: str) -> int:
    """Starts the job once it has been pending long enough."""
    if (FOLDER / "busy").exists():
        (FOLDER / "busy").unlink()
        print("slurm_load_jobs error: Socket timed out on send/recv operation", file=sys.stderr)
        return 1
    job = FOLDER / f"job-{arguments[arguments.index('--jobs') + 1]}"
    script, pid, pending = job.with_suffix(".sh").read_text(), job.with_suffix(".pid"), FOLDER / "pending"
    if job.with_suffix(".cancelled").exists():
        print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
        return 1
    left = int(pending.read_text()) if pending.exists() else 0
    if left > 0:
        pending.write_text(str(left - 1))
        print("PENDING|Priority|")
        return 0
    count = int(re.findall(r"--nodes=(\d+)", script)[0])
    nodes = (FOLDER / "nodes").read_text().split()[:count]
    if not pid.exists():
        output = re.findall(r"#SBATCH --output=(\S+)", script)[0]
        with Path(output).open("ab") as file:
            env = {**os.environ, "SLURM_JOB_ID": job.name, "SLURM_JOB_NODELIST": ",".join(nodes)}
            process = subprocess.Popen(
                ["bash", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=env,
                start_new_session=True,
            )
        pid.write_text(str(process.pid))
    over = job.with_suffix(".over")
    print(f"{over.read_text().strip()}|None|" if over.exists() else f"RUNNING|None|{','.join(nodes)}")
    return 0


def scontrol(*arguments: str) -> int:
    """`show hostnames`."""
    print("\n".join(arguments[2].split(",")))
    return 0


def scancel(job: str) -> int:
    """Ends the job's processes."""
    (FOLDER / f"job-{job}.cancelled").touch()
    pid = FOLDER / f"job-{job}.pid"
    if pid.exists():
        try:
            os.killpg(int(pid.read_text()), signal.SIGTERM)
        except ProcessLookupError:
            print(f"scancel: error: job {job} has ended", file=sys.stderr)
            return 1
    return 0


def srun(*arguments: str) -> int:
    """Runs a command on each node, and ends with the last of them."""
    options = [argument for argument in arguments if argument.startswith("--")]
    command = [argument for argument in arguments if not argument.startswith("--")]
    listed = [option.partition("=")[2] for option in options if option.startswith("--nodelist=")]
    running: list[subprocess.Popen[bytes]] = []
    for node in (listed or [os.environ["SLURM_JOB_NODELIST"]])[0].split(","):
        env = {**os.environ, "SLURMD_NODENAME": node}
        running.append(subprocess.Popen(_on(node, command), env=env, stdin=subprocess.DEVNULL, start_new_session=True))
    signal.signal(signal.SIGTERM, lambda *_: [os.killpg(process.pid, signal.SIGTERM) for process in running])
    while any(process.poll() is None for process in running):
        time.sleep(0.05)
    return max(process.returncode for process in running)


def _on(node: str, command: list[str]) -> list[str]:
    with socket.socket() as probe:
        if probe.connect_ex((node, PORT)) == 0:
            passed_on = [f"{name}={shlex.quote(value)}" for name, value in os.environ.items() if "HYPERACTOR" in name]
            return run_there(node, f"env {' '.join(passed_on)} SLURMD_NODENAME={node} {' '.join(command)}")
    return command


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    sys.exit({"sbatch": sbatch, "squeue": squeue, "scontrol": scontrol, "scancel": scancel, "srun": srun}[name](*rest))
