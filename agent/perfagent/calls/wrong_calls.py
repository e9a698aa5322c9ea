"""What a script gets for a call of ours that cannot work: an error of one sentence and a traceback that ends at its own
line. Scripts come from other trackers: for the names of their options and functions the error says what perfagent has
instead. What perfagent takes of their calls is in other_trackers.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from inspect import CO_VARKEYWORDS
from types import FunctionType
from typing import ParamSpec, TypeVar, cast

from perfagent.errors import ConfigError

__all__ = ["FUNCTIONS", "OPTIONS", "checked", "instead_of", "unknown_option"]

P = ParamSpec("P")
R = TypeVar("R")

_NOT_NEEDED = "nothing: leave it out"
_NO_SPACES = "a server of its own: server=ADDRESS, or PERFAGENT_SERVER"
_CHANNELS = "channels of the server (docs/webhooks.md)"
_NO_ARTIFACTS = "no artifacts: keep files where they are, and their paths in config="
OPTIONS = {
    "mode": 'record=FOLDER for mode="offline" (`perfagent sync FOLDER` sends it later); PERFAGENT_DISABLED=1 for mode="disabled"',
    "entity": "projects, and no teams above them: leave it out",
    "job_type": "group= or tags=",
    "dir": "record=FOLDER, which records instead of sending",
    "id": "run_id=",
    "resume": "run_id=: the same id again goes on with that run",
    "resume_from": "run_id= and start_step=",
    "fork_from": "run_id= and start_step=",
    "reinit": "this always: a second call with another name or project ends the first run and begins one",
    "sync_tensorboard": "tensorboard=FOLDER, which writes event files",
    "config_exclude_keys": "no filter of names: leave those keys out of config=",
    "config_include_keys": "no filter of names: pass those keys as config=",
    "space_id": _NO_SPACES,
    "dataset_id": _NO_SPACES,
    "bucket_id": _NO_SPACES,
    "server_url": _NO_SPACES,
    "webhook_url": _CHANNELS,
    "webhook_min_level": _CHANNELS,
    "experiment_name": "name=",
    "run_name": "name=",
    "project_name": "project=",
    "description": "notes=",
    "anonymous": _NOT_NEEDED,
    "allow_val_change": _NOT_NEEDED,
    "force": _NOT_NEEDED,
    "magic": _NOT_NEEDED,
    "monitor_gym": _NOT_NEEDED,
    "save_code": "the git commit of the script, recorded always: leave it out",
    "settings": "settings as arguments and PERFAGENT_ variables (docs/configuration.md)",
}
"""Options of `init` in other trackers, and what perfagent has instead."""

FUNCTIONS = {
    "summary": "the summary of a run: call init() first",
    "define_metric": "charts over the step alone: log(..., step=n)",
    "save": "Checkpoint, for checkpoints; other files are not uploaded",
    "sync": "`perfagent sync FOLDER`, which sends what was recorded",
    "log_artifact": _NO_ARTIFACTS,
    "use_artifact": _NO_ARTIFACTS,
    "restore": _NO_ARTIFACTS,
    "log_metric": "log({name: value})",
    "log_metrics": "log({name: value})",
    "log_param": "config[name] = value, of the run",
    "log_params": "config.update({name: value}), of the run",
    "Artifact": _NO_ARTIFACTS,
    "Video": "Image(batch) for its frames: log() takes no video",
    "Html": "Table and Image: log() takes no HTML, which could run in the browser of whoever looks",
    "sweep": "tune(), find_batch_size() and find_num_workers(), which search for speed",
    "agent": "tune(), find_batch_size() and find_num_workers(), which search for speed",
    "Api": "perfagent_client.Client, which reads runs",
}
"""Functions and classes of other trackers, and what perfagent has instead."""


def instead_of(name: str, public: Iterable[str]) -> str:
    """For an attribute that is not there: what perfagent has in its place."""
    return f"it has {FUNCTIONS[name]}" if name in FUNCTIONS else f"it has {', '.join(public)}"


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Around a documented function: an argument that it does not have is named with what there is instead, and its own
    ConfigError comes without the frames of ours in which it was found."""
    code = cast(FunctionType, function).__code__
    takes = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = None if code.co_flags & CO_VARKEYWORDS else next((name for name in kwargs if name not in takes), None)
        if unknown is not None:
            raise TypeError(unknown_option(code.co_name, unknown, takes))
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            raise error.with_traceback(None) from None

    return call


def unknown_option(function: str, given: str, takes: Iterable[str]) -> str:
    """takes: the arguments that the function has."""
    if given in OPTIONS:
        return f"{function}() has no argument {given!r}; perfagent has {OPTIONS[given]}"
    import difflib  # not with the training: few calls are wrong

    near = difflib.get_close_matches(given, known := [*takes], 1)
    instead = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(known)}"
    return f"{function}() has no argument {given!r}; {instead}"
