"""What `tests/conftest.py` does at the end: it ends tasks of other threads, and says which tests did not run."""

import asyncio
import concurrent.futures
import threading
import time

_LOOK_S = 0.1


def end_tasks(loop: asyncio.AbstractEventLoop | None, thread: threading.Thread | None, limit_s: float = 60.0) -> None:
    """Cancels the tasks of a loop that runs in `thread`, and waits until they have ended.

    A loop that is stopped or closed, or whose thread has ended, executes no task, so there is nothing to wait for. This
    holds for a loop that stops meanwhile, too. Raises RuntimeError, which names the tasks, if some still run after
    `limit_s`, and if the loop does not answer.
    """
    if loop is None or thread is None or not _runs(loop, thread):
        return
    cancelling = _cancel_tasks(limit_s)
    try:
        answer = asyncio.run_coroutine_threadsafe(cancelling, loop)
    except RuntimeError:  # the loop was closed a moment ago
        cancelling.close()
        return
    deadline = time.monotonic() + 2 * limit_s
    while not concurrent.futures.wait([answer], timeout=_LOOK_S).done:
        if not _runs(loop, thread):
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"the event loop of thread {thread.name!r} did not answer within {2 * limit_s:g} s")
    if left := answer.result():
        raise RuntimeError(f"tasks of thread {thread.name!r} did not end within {limit_s:g} s: {', '.join(left)}")


def _runs(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> bool:
    return thread.is_alive() and loop.is_running()


async def _cancel_tasks(limit_s: float) -> list[str]:
    """Names those that still run after `limit_s`."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    left = (await asyncio.wait(tasks, timeout=limit_s))[1] if tasks else ()
    return sorted(str(task.get_coro()) for task in left)
