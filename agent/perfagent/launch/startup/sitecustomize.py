"""Runs at interpreter start-up in a process that `perfagent run` started: removes itself and waits for torch.

Python finds this file through PYTHONPATH. The file restores sys.path and os.environ, and adds import finders, which are gone when
torch or perfagent is imported. The user's own sitecustomize is hidden by this one, so it runs at the end. Little is imported,
and nothing where no training may follow.
"""
# ruff: noqa: PTH100, PTH120, PTH123, BLE001 - the user's process may not want pathlib and contextlib loaded

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing is not loaded either
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def _arm() -> None:
    text = os.environ.get("PERFAGENT_RUN_LAUNCH")
    if text is None:
        return
    import json

    launch = json.loads(text)
    mine = launch["pid"] == os.getpid()
    launcher = launch["workers_have"]
    if mine and launcher:
        return  # torchrun itself is not monitored; its workers find the hook in the environment that they inherit
    worker = any(name in os.environ for name in launcher) and _descends_from(launch["pid"])
    if launcher and not worker:
        return
    os.environ.pop("PERFAGENT_RUN_LAUNCH", None)
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = os.pathsep.join(entry for entry in entries if not entry or os.path.abspath(entry) != _HERE)
    if rest:
        os.environ["PYTHONPATH"] = rest
    else:
        os.environ.pop("PYTHONPATH", None)
    if worker:
        launch["watched"] = _watch(text)
        text = json.dumps(launch)
    if mine or worker:
        _wait(text, alone=mine and launch["start"][0] is not None)


def _watch(text: str) -> bool:
    """Has a process beside this worker see how it ends. Forked here: there are no threads yet, and what that process imports is
    imported there."""
    trainer = os.getpid()
    try:
        first = os.fork()
    except OSError:
        return False
    if first:
        return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == 0
    status = 1
    try:
        os.setsid()
        if os.fork() == 0:
            from perfagent.launch.watcher import watch_worker
            from perfagent.process import launch_options

            watch_worker(trainer, launch_options.read(text))
        status = 0
    finally:
        os._exit(status)  # neither of the two is the script's


def _descends_from(ancestor: int) -> bool:
    """Workers are children of the launcher, or grandchildren where a wrapper stands between."""
    pid = os.getppid()
    for _ in range(4):
        if pid == ancestor:
            return True
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return False


def _wait(text: str, *, alone: bool) -> None:
    """For the first import of torch or perfagent, with which the session starts, or for an exception that ends the script
    before. alone: this process is the whole job."""
    pid, shown = os.getpid(), sys.excepthook

    def begin() -> None:
        for finder in finders:
            finder.forget()
        if sys.excepthook is crashed:
            sys.excepthook = shown
        if os.getpid() == pid:
            _start(text, alone=alone)

    def crashed(kind: Any, error: Any, trace: Any) -> None:
        shown(kind, error, trace)
        if isinstance(error, Exception) and finders[0] in sys.meta_path:
            import contextlib
            import logging

            logging.getLogger("perfagent").disabled = True  # the traceback says it all
            begin()
            with contextlib.suppress(Exception):  # without a session the watcher reports the exit code
                sys.modules["perfagent.session"].current().fail(error)

    # From its file, since an import of perfagent by the script is to be seen; and the script may have a module of that name.
    hooks: Any = _executed("import_hooks", [f"{_HERE}/../../boundary"])
    del sys.modules["import_hooks"]
    finders = [hooks.Once(name, begin) for name in ("torch", "perfagent")]
    sys.meta_path[:0] = finders
    sys.excepthook = crashed


def _start(text: str, *, alone: bool) -> None:
    try:
        from perfagent.process import launch_options

        options = launch_options.current = launch_options.read(text)
        from perfagent.session import start_from_launcher

        start_from_launcher(**options.for_session())
        if alone:
            from perfagent.launch.children import watch

            watch(text)
    except Exception as error:
        sys.stderr.write(f"perfagent: not monitored: {type(error).__name__}: {error}\n")


def _executed(name: str, folders: list[str]) -> ModuleType | None:
    """The module of that name in these folders; None where there is none."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec(name, folders)
    if spec is None or spec.loader is None:
        return None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
sys.path_importer_cache.pop(_HERE, None)
try:
    _arm()
except Exception as error:
    sys.stderr.write(f"perfagent: not monitored: {type(error).__name__}: {error}\n")
_executed("sitecustomize", sys.path)  # what Python would have run in our place
