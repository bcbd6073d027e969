"""Runs Python code that a model wrote where it can harm nobody: in a sandbox of its own, killed after its time.

The code sees /usr and the Python that runs it, read-only, and a scratch folder in memory. It has no network, no other
processes, no environment variables and no rights. `rl.envs.sandbox.ways` says how; docs/safety.md says what remains.
"""

from rl.envs.sandbox.run import SandboxResult, run_python
from rl.envs.sandbox.ways import Sandbox, find_way

__all__ = ["Sandbox", "SandboxResult", "find_way", "run_python"]
