"""Processor time of this process, without that of threads that only wait and watch."""

import time
from contextlib import suppress
from pathlib import Path

TASKS = Path("/proc/self/task")
# Beginning of the names of gloo's threads, one for each group.
LOOP = "gloo"


def worked_seconds() -> float:
    """Return the seconds of processor time that this process has taken, but for gloo's loops and the calling thread.

    Each loop wakes up a hundred times a second while nothing comes, which takes 1 to 5 ms: several of them look like
    work. A call of this function takes 2 ms where the processor's caches are cold, which is no work either.
    """
    return time.process_time() - time.thread_time() - sum(map(_seconds_of, gloo_loops()))


def gloo_loops() -> list[int]:
    """Return the numbers of the threads that are gloo's loops."""
    found = []
    for task in TASKS.iterdir():
        # It may have ended.
        with suppress(OSError):
            if (task / "comm").read_text().startswith(LOOP):
                found.append(int(task.name))
    return found


def _seconds_of(thread: int) -> float:
    with suppress(OSError):
        # The clock of pthread_getcpuclockid.
        return time.clock_gettime((~thread << 3) | 6)
    return 0.0
