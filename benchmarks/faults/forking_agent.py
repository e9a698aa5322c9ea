"""A process that forks while an agent and four other threads hold whatever locks they hold.

    python forking_agent.py METHOD COUNT

METHOD is `os` (os.fork itself), or a start method of multiprocessing: fork, spawn, forkserver. Every child uses the
agent's public functions, logging and an import, checks that nothing of the agent is alive in it, and ends. Prints `bad
N`: children that hung for 20 s or failed; and whether the parent delivers afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

WAIT_S = 20.0


class Quiet(logging.Handler):
    """Takes logging's locks and writes nowhere: a buffered file's own lock is not let go of in a child (CPython's
    matter)."""

    def emit(self, record: logging.LogRecord) -> None: ...


def child() -> None:
    """What a DataLoader's worker may do. Raises when something of the agent is alive here."""
    import perfagent

    logging.getLogger("child").warning("from a child")
    importlib.import_module("colorsys")
    if "perfagent.session" in sys.modules:  # a fork has its parent's run; what was spawned has none
        perfagent.log({"child": 1.0})
        perfagent.alert("from a child")
        perfagent.finish()
    assert not (alive := [thread for thread in threading.enumerate() if thread.name.startswith("perfagent")]), alive
    assert not (left := [name for name in open_files() if "/spool/" in name]), left


def open_files() -> list[str]:
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is closed again
            names.append(str(link.readlink()))
    return names


def fork_once() -> bool:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child()
            assert len(tasks := [*Path("/proc/self/task").iterdir()]) == 1, tasks
            assert not (left := [name for name in open_files() if "socket" in name]), left
            code = 0
        except BaseException as error:
            os.write(2, repr(error).encode())
        finally:
            os._exit(code)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.0005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False


def process_once(method: str) -> bool:
    process = multiprocessing.get_context(method).Process(target=child)
    process.start()
    process.join(WAIT_S)
    if process.is_alive():
        process.kill()
        process.join()
        return False
    return process.exitcode == 0


def main(method: str, count: int) -> None:
    import perfagent

    logging.basicConfig(handlers=[Quiet()])
    run = perfagent.init(run_id=f"forks-{method}", project="faults")
    stop = threading.Event()

    def write(name: str) -> None:
        while not stop.wait(0.0005):
            run.log({name: 1.0})
            run.alert(name) if time.monotonic_ns() % 100 == 0 else None

    def log() -> None:
        while not stop.wait(0.0002):
            logging.getLogger("parent").warning("a line")

    def load() -> None:
        while not stop.wait(0.001):
            sys.modules.pop("wave", None)
            importlib.import_module("wave")

    threads = [threading.Thread(target=write, args=(f"noise/{n}",)) for n in range(2)]
    threads += [threading.Thread(target=log), threading.Thread(target=load)]
    for thread in threads:
        thread.start()
    bad = sum(not (fork_once() if method == "os" else process_once(method)) for _ in range(count))
    stop.set()
    for thread in threads:
        thread.join()
    run.log({"last": 1.0})
    delivered = run._sender.flush(20.0)
    run.finish()
    print("bad", bad, "delivered", delivered)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
