"""Runs at interpreter start-up in a process that `perfagent run` started: removes itself and waits for torch.

Python finds this file through PYTHONPATH. The file restores sys.path and os.environ, and adds one import finder, which removes
itself when torch or perfagent is imported. The user's own sitecustomize is hidden by this one, so it runs at the end. Only
modules that every interpreter loads are imported.
"""
# ruff: noqa: PTH100, PTH120, PTH123, SIM105, BLE001 - the user's process may not want pathlib and contextlib loaded

from __future__ import annotations

import os
import sys
from _thread import get_ident

TYPE_CHECKING = False  # typing is not loaded either
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_WORKERS_HAVE = ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")
"""Variables that a launcher sets for the workers it starts: accelerate sets no rank where it starts only one."""
_HERE = os.path.dirname(os.path.abspath(__file__))


def _arm() -> None:
    text = os.environ.get("PERFAGENT_RUN_LAUNCH")
    if text is None:
        return
    import json

    launch = json.loads(text)
    mine = launch["pid"] == os.getpid()
    if mine and launch["launcher"]:
        return  # torchrun itself is not monitored; its workers find the hook in the environment that they inherit
    worker = launch["launcher"] and any(name in os.environ for name in _WORKERS_HAVE) and _descends_from(launch["pid"])
    if launch["launcher"] and not worker:
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
        sys.meta_path.insert(0, _Finder(text, alone=mine and launch["start"][0] is not None))


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


class _Finder:
    """Waits for the first import of torch or perfagent, lets it happen as ever, starts the session, and is gone. A spec that is
    never executed (of importlib.util.find_spec, as transformers calls it) changes nothing. alone: this process is the
    whole job."""

    def __init__(self, text: str, *, alone: bool) -> None:
        self._text, self._alone, self._pid = text, alone, os.getpid()
        self._asking: set[int] = set()  # threads that ask the other finders, of which some ask all others as we do

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        me = get_ident()
        if name not in ("torch", "perfagent") or os.getpid() != self._pid or me in self._asking:
            return None
        self._asking.add(me)
        try:
            for finder in list(sys.meta_path):
                spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
                if spec is not None:
                    break
            else:
                return None  # not installed: the script may look again elsewhere
        finally:
            self._asking.discard(me)
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            try:
                del loader.exec_module  # type: ignore[union-attr]
            except AttributeError:
                pass
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._start()

        try:
            loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
        except AttributeError:  # a loader with slots: this script goes unmonitored, and runs
            pass
        return spec

    def _start(self) -> None:
        try:
            from perfagent.process import launch_options

            options = launch_options.current = launch_options.read(self._text)
            from perfagent.session import start_from_launcher

            start_from_launcher(**options.for_session())
            if self._alone:
                from perfagent.launch.children import watch

                watch(self._text)
        except Exception as error:
            sys.stderr.write(f"perfagent: not monitored: {type(error).__name__}: {error}\n")


def _run_the_users() -> None:
    """What Python would have run in our place."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
sys.path_importer_cache.pop(_HERE, None)
try:
    _arm()
except Exception as error:
    sys.stderr.write(f"perfagent: not monitored: {type(error).__name__}: {error}\n")
_run_the_users()
