"""The waiting half of the watcher: a bare interpreter (python -I -S, some 5 MB) that sleeps on the trainer's pidfd.

A script and not a module of the package in use: it imports four built-in modules, and becomes watcher.py (exec) when
there is something to report: the trainer ended, or it has run for a while without a session of its own. Its argument is
JSON made by watcher.watch(), to which it adds when the trainer ended; descriptor 3 is the pidfd.
"""

import os
import select
import sys
import time

PIDFD = 3
UNSEEN_MS = 5000


def seen(locks: str, name: bytes) -> bool:
    """Whether a source of this process exists: its lock file holds pid and start of its owner."""
    try:
        folders = os.listdir(locks)  # noqa: PTH208 - pathlib is not loaded here
    except OSError:
        return False
    for folder in folders:
        try:
            fd = os.open(f"{locks}/{folder}/lock", os.O_RDONLY)
        except OSError:
            continue
        try:
            if os.read(fd, 64) == name:
                return True
        finally:
            os.close(fd)
    return False


def main() -> None:
    python, locks, name, options = sys.argv[1:5]
    poll = select.poll()
    poll.register(PIDFD, select.POLLIN)
    ended = poll.poll(UNSEEN_MS)
    while not ended and seen(locks, name.encode()):
        ended = poll.poll()
    # Here, and not once watcher.py is loaded: an error of another rank, which this end caused, would seem to be the
    # first.
    when = f"{time.time()!r} {time.monotonic()!r}" if ended else ""
    os.set_inheritable(PIDFD, True)
    os.execv(python, [python, "-P", "-m", "perfagent.launch.watcher", options, when])  # noqa: S606


main()
