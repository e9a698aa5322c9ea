"""What scripts of W&B and trackio call besides `init`, `log` and the media, for those that say `import perfagent as wandb`
or `as trackio`: a few work, the others say once what they leave out, and the training goes on.
What would hand data back (`use_artifact`, `restore`, `Api`) gives what takes any call: a script that does more with it
than to keep it cannot go on.
"""

from __future__ import annotations

import enum
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from perfagent.boundary.guard import logger
from perfagent.calls.wrong_calls import FUNCTIONS, WORDS, instead_of, unknown_option
from perfagent.errors import PerfagentError
from perfagent.identity.naming import draw_id

if TYPE_CHECKING:
    from perfagent.agent_config import AgentConfig
    from perfagent.identity import Identity

__all__ = ["OFFLINE", "add_names_of_others", "of_module", "options_of_init", "say_once", "say_unknown"]

OFFLINE = "perfagent-offline"
"""The folder of `mode="offline"`, below `dir=` or the working folder."""


class Run(Protocol):
    """The part of perfagent.Run that this module uses."""

    settings: AgentConfig
    _identity: Identity

    @property
    def id(self) -> str | None: ...
    @property
    def url(self) -> str | None: ...
    @property
    def project(self) -> str: ...
    @property
    def start_step(self) -> int | None: ...
    @property
    def steps_done(self) -> int: ...
    def log(self, metrics: Mapping[str, Any], *, commit: bool | None = None) -> None: ...
    def take_up(self, model: object, optimizer: object, config: dict[str, Any], tags: list[str]) -> None: ...
    def warn_of_next_training(self, model: object) -> None: ...


_said: set[str] = set()


def say_once(topic: str, sentence: str) -> None:
    """Warns once a process of a topic; not where everything is a silent no-op."""
    run = _current()
    if topic not in _said and not (run is not None and run.settings.disabled):
        _said.add(topic)
        logger.warning("perfagent: %s", sentence)


def say_unknown(function: str, given: Iterable[str]) -> None:
    """Arguments of a function that it does not have, and leaves out."""
    for name in given:
        say_once(f"{function} {name}", f"{function}() has no argument {name!r}; it is left out")


# ---- init


def options_of_init(own: dict[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Options of other trackers, as those of perfagent's init(); and by option, a sentence for each that has none.

    own: those of ours that the call named. given: the others.
    """
    options, left_out = dict(own), dict[str, str]()
    for text in ("name", "group", "notes"):
        options[text] = options[text] or None  # wandb takes "" for nothing
    early = vars(sys.modules["perfagent"]).pop("_config", None)
    options["config"] = early if options["config"] is None else options["config"]
    for name, value in given.items():
        if value is None or name in WORDS["needs nothing"]:
            continue
        if name in WORDS["renamed"]:
            ours = WORDS["renamed"][name]
            options[ours] = value if options[ours] is None else options[ours]
        elif name == "mode" and value in ("disabled", "offline", "dryrun", "online"):
            if value == "disabled":
                options["disabled"] = True
            elif value != "online" and options["record"] is None:
                folder = options["record"] = Path(given.get("dir") or ".") / OFFLINE
                left_out["mode"] = (
                    f"mode={value!r}: the run is recorded in {folder}; `perfagent sync {folder}` sends it later"
                )
        elif name == "job_type":
            options["tags"] = [*options["tags"], str(value)]
        # what resume= does, an id alone does here
        elif name != "resume" or (given.get("id") is None and value not in (False, "never", "allow", "auto")):
            left_out[name] = unknown_option("init", name, own).removesuffix(": leave it out") + "; it is left out"
    return options, left_out


# ---- names of the module, and of a run


def of_module(name: str, public: Iterable[str]) -> Any:
    """A name of another tracker's module. Raises AttributeError for what is none, with what there is instead."""
    if name in _OF_MODULE:
        return _OF_MODULE[name]
    if name in _CLASSES:
        return _CLASSES[name]
    if name == "summary" and (run := _current()) is not None:
        return getattr(run, name)
    if name in _CALLS:
        return partial(_of_current, name)
    raise AttributeError(f"module 'perfagent' has no attribute {name!r}; {instead_of(name, public)}")


class _Foreign:
    """A name of another tracker's run. What an instance has under that name comes first."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: Any, kind: type) -> Any:
        name = self._name
        if run is None:
            return self
        if name in _VALUES:
            return _VALUES[name](run)
        if name in _CALLS:
            return partial(_CALLS[name], run)
        said = f"'Run' object has no attribute {name!r}; it has {FUNCTIONS[name]}"
        raise AttributeError(said, name=name, obj=run)


def add_names_of_others(kind: type) -> None:
    """Adds the method names of other trackers' runs to perfagent's run class. `__getattr__` would do, but makes every
    attribute access three times as slow: 1.8 µs for each call of log()."""
    for name in (*_VALUES, *_CALLS, *FUNCTIONS):
        if not hasattr(kind, name):
            setattr(kind, name, _Foreign(name))


def _current() -> Run | None:
    run: Run | None = sys.modules["perfagent"].run
    return run


def _of_current(name: str, *args: object, **kwargs: object) -> Any:
    run = _current()
    if run is not None:
        return getattr(run, name)(*args, **kwargs)
    return say_once(f"early {name}", f"{name}() was called before attach() or init(); left out")


class _Summary(dict[str, Any]):
    """`run.summary["best"] = 0.9` is logged as `summary/best`. Holds what the script put in, and nothing that was
    logged."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.__dict__["_run"] = run

    def __missing__(self, name: str) -> float:
        said = f"summary[{name!r}] is NaN: perfagent keeps no logged values in the process; the run's page has them"
        say_once(f"summary {name}", said)
        return math.nan

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.__dict__["_run"].log({f"summary/{name}": value}, commit=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy, pickle and notebooks ask for these
            raise AttributeError(name)
        return self[name]

    __setattr__ = __setitem__

    def update(self, *given: Any, **more: Any) -> None:
        for name, value in dict(*given, **more).items():
            self[name] = value


class _LeftOut:
    """Takes any call. kind: what it stands for, said once."""

    kind = ""

    def __init__(self, *_: object, **__: object) -> None:
        self()

    def __getattr__(self, name: str) -> _LeftOut:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> _LeftOut:
        say_once(self.kind, f"{self.kind} is left out: perfagent has {FUNCTIONS.get(self.kind, 'nothing like it')}")
        return self

    def __enter__(self, *_: object) -> _LeftOut:
        return self

    __getitem__ = __enter__

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __exit__(self, *_: object) -> None:
        pass


_CLASSES: dict[str, Any] = {name: type(name, (_LeftOut,), {"kind": name}) for name in WORDS["classes"]}
_CLASSES["plot"] = _CLASSES["plot"].__new__(_CLASSES["plot"])  # a module of W&B: each of its attributes takes any call
AlertLevel = enum.Enum("AlertLevel", {"INFO": "INFO", "WARN": "WARN", "ERROR": "ERROR"})


def _nothing(*_: object, **__: object) -> None:
    """There is nothing to do."""


def _left_out(name: str, *_: object, **__: object) -> None:
    say_once(name, f"{name}() is left out: perfagent has {FUNCTIONS[name]}")


def _join(*args: Any, **kwargs: Any) -> None:
    sys.modules["perfagent"].finish(*args, **kwargs)


def _sweep(*_: object, **__: object) -> str:
    _left_out("sweep")
    return draw_id()


def _agent(_sweep: object = None, function: Callable[[], object] | None = None, *_: object, **__: object) -> None:
    say_once("agent", f"agent() runs its function once, as it is: perfagent has {FUNCTIONS['agent']}")
    if function is not None:
        function()


def _show(*_: object, **__: object) -> str | None:
    """The address of the run's page, printed as trackio prints its own."""
    run = _current()
    address = None if run is None else run.url
    logger.warning("perfagent: %s", address or "the dashboard is at the address that `perfagent up` prints")
    return address


def _print(text: object = "", *_: object, **__: object) -> None:
    sys.stderr.write(f"{text}\n")


_OF_MODULE: dict[str, Any] = {
    "AlertLevel": AlertLevel,
    "Settings": SimpleNamespace,
    "agent": _agent,
    "data_types": sys.modules["perfagent"],
    "join": _join,
    "login": lambda *_, **__: True,
    "show": _show,
    "sweep": _sweep,
    "util": SimpleNamespace(generate_id=lambda *_, **__: draw_id()),
    **dict.fromkeys(("CommError", "Error"), PerfagentError),
    **dict.fromkeys(("ensure_configured", "require", "setup", "teardown"), _nothing),
    **dict.fromkeys(("termerror", "termlog", "termwarn"), _print),
    **{name: partial(_left_out, name) for name in ("restore", "sync")},
}


def _watch(run: Run, models: object = None, *_: object, **__: object) -> None:
    """Gradients and losses are recorded anyway: that is the model."""
    for model in models if isinstance(models, (list, tuple)) else [models]:
        if hasattr(model, "named_parameters"):
            run.warn_of_next_training(model)
            run.take_up(model, None, {}, [])


def _save(_run: Run, path: object = None, *_: object, **__: object) -> None:
    """`run.save()` of older scripts is about the run's name, and needs nothing."""
    if path is not None:
        _left_out("save")


def _artifact(name: str, *_: object, **__: object) -> Any:
    _left_out(name)
    return _CLASSES["Artifact"].__new__(_CLASSES["Artifact"])


def _log_system(run: Run, metrics: Mapping[str, Any], *_: object, **__: object) -> None:
    run.log({f"system/{name}": value for name, value in metrics.items()}, commit=False)


_CALLS: dict[str, Callable[..., Any]] = {
    "get_url": lambda run: run.url,
    "log_system": _log_system,
    "project_name": lambda run: run.project,
    "save": _save,
    "watch": _watch,
    **{name: partial(_left_out, name) for name in ("define_metric", "restore")},
    **dict.fromkeys(("log_code", "log_cpu", "log_gpu", "mark_preempting", "unwatch"), _nothing),
    **dict.fromkeys(("link_artifact", "log_artifact", "log_model"), partial(_artifact, "log_artifact")),
    **dict.fromkeys(("use_artifact", "use_model"), partial(_artifact, "use_artifact")),
}


def _folder(run: Run) -> str:
    folder = Path("perfagent-files") / str(run.id)
    folder.mkdir(parents=True, exist_ok=True)
    say_once("dir", f"what the script writes to run.dir stays in {folder}: perfagent uploads no files")
    return os.fspath(folder)


_VALUES: dict[str, Callable[[Run], Any]] = {
    "dir": _folder,
    "disabled": lambda run: run.settings.disabled,
    "entity": lambda _run: "",
    "job_type": lambda _run: None,
    "offline": lambda run: run.settings.record is not None,
    "path": lambda run: f"{run.project}/{run.id}",
    "resumed": lambda run: bool(run.start_step),
    "start_time": lambda run: run._identity.attempt / 1000,
    "step": lambda run: run.steps_done,
    "summary": lambda run: vars(run).setdefault("summary", _Summary(run)),  # from here on found without us
    "sweep_id": lambda _run: None,
}
