"""Times what torch.compile takes of a step, `phase/compile_s`, by torch's own callbacks around each compilation.

torch calls them on the thread that compiles, which for a backward pass may be autograd's, and holds a lock meanwhile:
they take two stamps and append. torch drops them in `torch.compiler.reset()`, so they are put back now and then.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any

from perfagent.boundary.guard import guarded
from perfagent.hooks.phases import device_mark, note_phase
from perfagent.step.state import StepState, now, state

__all__ = ["install", "put_back", "remove", "step_of"]

_MODULE = "torch._dynamo.callback"
_steps: deque[tuple[str, int]] = deque(maxlen=256)
"""(torch's id of the compilation, the step it was in) of the newest ones."""
_open: list[tuple[int, int, int, Any]] = []
"""Thread, step, time and device mark at the start of the compilation that runs, if it is one of a step. torch calls for
the outermost one alone."""
_installed = False


def install(when_imported: Callable[[str, Callable[[], None]], None]) -> None:
    """Registers the callbacks once the script has imported what compiles; never imports that itself."""
    global _installed
    _installed = True
    when_imported(_MODULE, put_back)


def remove() -> None:
    global _installed
    _installed = False
    _open.clear()
    _take_out()


@guarded
def put_back() -> None:
    """Registers the callbacks where torch does not have them (any more)."""
    if not _installed or _MODULE not in sys.modules:
        return
    handler = sys.modules[_MODULE].callback_handler
    if _started not in handler.start_callbacks:
        handler.register_start_callback(_started)
    if _ended not in handler.end_callbacks:
        handler.register_end_callback(_ended)


@guarded
def _take_out() -> None:
    handler = getattr(sys.modules.get(_MODULE), "callback_handler", None)
    if handler is not None and _started in handler.start_callbacks:
        handler.remove_start_callback(_started)
    if handler is not None and _ended in handler.end_callbacks:
        handler.remove_end_callback(_ended)


def step_of(compile_id: str) -> int | None:
    """The step that the compilation was in; None if it is not known (any more)."""
    return next((step for known, step in reversed(list(_steps)) if known == compile_id), None)


@guarded
def _started(_: object = None) -> None:
    p = state.current
    _open.clear()
    if p is not None and not p.off and _is_in_step(p):
        mark = device_mark(p)
        if p.clock is None or mark is not None:
            _open.append((get_ident(), p.in_progress(), now(), mark))


@guarded
def _ended(info: Any = None) -> None:
    p = state.current
    if p is None or p.off:
        return
    _steps.append((_compile_id(info), p.completed + 1))
    if not _open:
        return
    thread, step, began, mark = _open.pop()
    if thread == get_ident() and step >= p.completed:
        note_phase(p, "compile", began, mark)
    elif p.clock is not None and mark is not None:
        p.clock.release([mark])


def _compile_id(info: Any) -> str:
    """info: what torch calls back with; older versions (2.4, 2.6) call without it, in the context of the compilation."""
    if info is not None:
        return str(info.compile_id)
    return str(sys.modules["torch._guards"].CompileContext.current_compile_id())


def _is_in_step(p: StepState) -> bool:
    """Whether the step waits for what this thread does, and nothing else counts the time: an evaluation or a fetch."""
    if p.phase_depth or p.data_depth:
        return False
    return p.thread == get_ident() or p.backward_depth > 0  # autograd's thread, for which the training thread waits
