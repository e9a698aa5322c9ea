"""What all loggers have in common: a call is captured once, its scalars are read, and the call goes on as it was.

A logger that forwards to another one (the Trainer to TensorBoard) is captured at the outermost call, under the names
given there. What is logged inside of such a call and was not given to it (by a callback of the script) counts as well.

A number is taken as it is, a tensor as `perfagent.log` takes it: without ever waiting for its device. What is no scalar
is ignored. The call costs one append more; what goes wrong here ends here, and the library's own errors pass through.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import get_ident
from typing import Any, NamedTuple

from perfagent.boundary.guard import failed, failures, guarded
from perfagent.device import is_tensor, read_all_later
from perfagent.step.state import StepState, state

__all__ = ["Logs", "captured", "record"]

MAX_STEP = 2**53
_NUMBERS = frozenset((float, int, bool))
_JOINTS = ("/", "_", ".", "-")


class Logs(NamedTuple):
    """Values that a call logs. step: which it names, None where it names none; own_step: the logger's own count of steps,
    if it has one. joint: between the name of a dict among the values and the names in it; "" where the library plots none
    of these. forwarded: the values under the names by which the library forwards them, where these may be others."""

    values: Mapping[str, object]
    step: object = None
    own_step: int | None = None
    joint: str = ""
    forwarded: Mapping[str, object] = {}


_inside: dict[int, Sequence[Logs]] = {}
"""Thread -> what was given to the outermost logger's call that runs on it."""


def captured(read: Callable[..., Sequence[Logs]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A watch for a logger's function. read: says of the arguments of a call what it logs, a row for each step."""
    reading = f"{read.__module__}.{read.__qualname__}"

    def watch(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def log(*args: Any, **kwargs: Any) -> Any:
            p = state.current
            if p is None or not p.logs.captures or p.off or reading in failures:
                return original(*args, **kwargs)
            me = get_ident()
            outer = _inside.get(me)
            rows: Sequence[Logs] = ()
            problem = None
            try:
                rows = read(*args, **kwargs)  # before the call, which may change what it was given
                for logs in rows:
                    _take(p, logs, outer)
            except Exception as error:  # noqa: BLE001 - arguments that the library refuses as well, or a version we do not know
                problem = error
            if outer is not None or not rows:
                result = original(*args, **kwargs)
            else:
                _inside[me] = rows
                try:
                    result = original(*args, **kwargs)
                finally:
                    _inside.pop(me, None)
            if problem is not None:  # and the library took them
                failed(reading, problem)
            return result

        return log

    return watch


@guarded
def record(logs: Logs) -> None:
    """For a logger of ours: writes what it was given into the run, also where the other loggers stay out."""
    p = state.current
    if p is not None and not p.off:
        _take(p, logs, _inside.get(get_ident()))


def _take(p: StepState, logs: Logs, outer: Sequence[Logs] | None) -> None:
    metrics = dict(logs.values)
    if not _NUMBERS.issuperset(map(type, metrics.values())):
        metrics = dict(_scalars(metrics, logs.joint))
        read_all_later(metrics)
    if outer is not None:
        metrics = {name: value for name, value in metrics.items() if not _is_forwarded(name, value, outer)}
    if metrics:
        p.log_captured(metrics, _whole(logs.step), logs.own_step)


def _scalars(values: Mapping[str, object], joint: str) -> Iterator[tuple[str, Any]]:
    """What may be a number. An array of another library the sender's thread reads, and may wait for its device."""
    for name, value in values.items():
        if isinstance(value, (int, float)) or (is_tensor(value) and value.numel() == 1):
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{name}{joint}{inner}", one) for inner, one in _scalars(value, joint) if joint)
        elif type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1:
            yield name, value.item()  # type: ignore[attr-defined] # now: an array may be changed in place
        elif getattr(value, "shape", None) == ():
            yield name, value


def _is_forwarded(name: object, value: object, outer: Sequence[Logs]) -> bool:
    """Whether it is one of the values that the outermost logger was given, maybe with something before its name:
    `train/loss` is the Trainer's `loss`."""
    for given, number in (item for logs in outer for part in (logs.values, logs.forwarded) for item in part.items()):
        tail = str(given)
        same_name = name == tail or str(name).endswith(tuple(joint + tail for joint in _JOINTS))
        if same_name and not _differ(value, number):
            return True
    return False


def _differ(a: object, b: object) -> bool:
    """Whether these are numbers for sure, and two of them; what is on a device is not known."""
    return type(a) is float and type(b) is float and a != b and not (math.isnan(a) and math.isnan(b))


def _whole(step: Any) -> int | None:
    """A step that a run can have, where one is named that can be read without waiting for a device."""
    if type(step) is not int:
        if isinstance(step, (str, bytes)) or (is_tensor(step) and not step.is_cpu):
            return None
        try:
            step = int(step)
        except (TypeError, ValueError, OverflowError):
            return None
    return max(0, step) if step <= MAX_STEP else None
