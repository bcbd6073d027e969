"""Programs of a cluster, such as `sbatch` or `kubectl`: the user's own, run as the user would."""

import asyncio
import contextlib
import shlex
import shutil
from collections.abc import Sequence

_LAST_CHARACTERS = 2000


async def output_of(command: Sequence[str], text: str = "", within_s: float = 30.0) -> str:
    """What a program prints, given `text` on its standard input.

    Raises ValueError, with what it said, if it fails, if it takes too long, and if there is no such program.
    """
    if shutil.which(command[0]) is None:
        raise ValueError(f"there is no program {command[0]!r} here; it is needed for these hosts")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        output, errors = await asyncio.wait_for(process.communicate(text.encode()), within_s)
    except TimeoutError:
        raise ValueError(f"`{shlex.join(command)}` has not ended within {within_s:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        said = (errors or output).decode(errors="replace").strip()[-_LAST_CHARACTERS:]
        raise ValueError(f"`{shlex.join(command)}` ended with status {process.returncode}: {said or 'it said nothing'}")
    return output.decode(errors="replace")
