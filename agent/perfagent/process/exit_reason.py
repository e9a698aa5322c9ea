"""Finds out why a process ended: from the exception that ended it, and from the argument of sys.exit, exit() or quit(),
which Python keeps nowhere.

The newest status counts, unless the training went on after it. Who catches an exception and leaves with a status that means
failure (Hydra, click, many a `main`) leaves because of it, if the handler is near. `raise SystemExit(n)` is not seen.

Nothing is imported here when it runs: after Ctrl-C an import at exit turns exit code 130 into 1.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import linecache
import sys
import threading
import tokenize  # noqa: F401 - linecache imports it when it reads a file
from collections.abc import Callable
from traceback import walk_tb
from types import FrameType
from typing import Any

from perfagent.libraries import EXITS

__all__ = [
    "Cause",
    "Facts",
    "Leaving",
    "cause",
    "handled",
    "of_exit_code",
    "out_of_memory",
    "text_of",
    "unused_parameters",
]

_NO_MEMORY = (
    "out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "_status_alloc_failed", "bad_alloc",
)  # fmt: skip
"""In the words of torch's allocators, of the libraries (cuBLAS, cuDNN, cuSOLVER, ...) that allocate for themselves, of
the C library, whose reason torch quotes where a file could not be mapped, and of C++."""

_BY_NUMBER = "Parameter indices which did not receive grad for rank"
_DIED = "exited unexpectedly"
_IMPORT_ANEW = ("SpawnProcess", "ForkServerProcess")
_CARRIED = "Original Traceback (most recent call last):"
_WITHOUT_GUARD = '. Spawned workers import the script, which has no `if __name__ == "__main__":`'
_TERMINATED = 128 + 15
"""How a shell, and most handlers of SIGTERM, end after that signal."""


Facts = dict[str, str | int]
"""A reason in the agent's words, as perfagent.wire.evidence.Reason has it: the server has the sentences."""


def of_exit_code(code: int, said: str = "") -> tuple[str, Facts]:
    """State and reason of a process that ended with such a code, and with these words."""
    if not code:
        return "finished", {}
    key, state = ("exit_code_sigterm", "preempted") if code == _TERMINATED else ("exit_code", "failed")
    return state, {"key": key, "code": code, "said": said}


def cause(error: BaseException) -> tuple[str, str, str, str]:
    """State, reason, exception and traceback of a process that an exception ended."""
    name = type(error).__name__
    try:
        message = text_of(error).strip()
        ending = "oom" if any(map(out_of_memory, chain_of(error))) else "failed"
        first, *rest = message.splitlines() or [name]
        # of an error that torch carries over from a loader's worker the first line only says where it was caught
        first = (f"{first} {rest[-1]}" if _CARRIED in rest else first)[:500]
        first += _WITHOUT_GUARD if _lacks_guard(error) else ""
        return ending, name if first == name else f"{name}: {first}", name, _traceback(error)
    except Exception:  # noqa: BLE001 - without memory, or with somebody else's properties: the end must be reported all the same
        return "failed", name, name, ""


def text_of(value: object, most: int | None = None) -> str:
    """What an exception or another object says; the name of its type where its own `__str__` fails."""
    try:
        return str(value)[:most]
    except Exception:  # noqa: BLE001 - somebody else's, or a whole number of more than 4300 digits
        return type(value).__name__


def unused_parameters(error: BaseException) -> str:
    """The names of the parameters that DistributedDataParallel waited for in vain, of which its error gives the numbers
    only: "spare.weight, spare.bias". "" for any other error."""
    numbers = text_of(error).partition(_BY_NUMBER)[2].partition(":")[2].split("\n")[0]
    try:
        frame = _frame_in(error, "torch.nn.parallel.distributed") if numbers else None
        if frame is None:
            return ""
        wrapper = frame.f_locals["self"]
        named = wrapper.module.named_parameters()
        waited = [name for name, p in named if p.requires_grad and name not in wrapper.parameters_to_ignore]
        return ", ".join(waited[int(number)] for number in numbers.split())
    except Exception:  # noqa: BLE001 - another torch or message, or somebody else's `named_parameters`
        return ""


def _lacks_guard(error: BaseException) -> bool:
    """Whether a loader's worker died that was spawned, and so has to import the script, of which nothing says that it
    trains only where it is started."""
    if _DIED not in text_of(error):
        return False
    loading, script = _frame_in(error, "torch.utils.data.dataloader"), _frame_in(error, "__main__")
    workers = () if loading is None else getattr(loading.f_locals.get("self"), "_workers", ())
    source = "" if script is None else "".join(linecache.getlines(script.f_code.co_filename))
    return bool(source) and "__main__" not in source and any(type(one).__name__ in _IMPORT_ANEW for one in workers)


def _frame_in(error: BaseException, module: str) -> FrameType | None:
    """The first of the functions of a module that an exception left."""
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    return next((frame for frame in frames if frame.f_globals.get("__name__") == module), None)


def out_of_memory(error: BaseException) -> bool:
    """Whether the exception itself says that memory ran out: CUDA's own type, Python's, or the words of what
    allocates."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"OutOfMemoryError", "MemoryError"}:
        return True
    if isinstance(error, OSError):  # a fork or a mapping that the kernel refused
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    return any(words in text_of(error).lower() for words in _NO_MEMORY)


def chain_of(error: BaseException) -> list[BaseException]:
    """An exception and those that it came from."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain and len(chain) < _LONGEST_CHAIN:
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return chain


def _traceback(error: BaseException, limit: int = 50) -> str:
    """The traceback as text, like Python's own but by hand: the traceback module imports more when it formats certain
    frames."""
    parts: list[str] = []
    for one in reversed(chain_of(error)):
        lines = ["Traceback (most recent call last):"]
        for code, number in [(frame.f_code, line) for frame, line in walk_tb(one.__traceback__)][-limit:]:
            lines.append(f'  File "{code.co_filename}", line {number}, in {code.co_name}')
            source = linecache.getline(code.co_filename, number).strip()
            if source:
                lines.append(f"    {source}")
        lines.append(f"{type(one).__name__}: {text_of(one)}"[:2000])
        parts.append("\n".join(lines))
    return "\n\nDuring handling of the above exception, another exception occurred:\n\n".join(parts)[-20_000:]


_NEAR = 4
"""Frames from the innermost, that of sys.exit here among them: who calls it, and two above."""
_LONGEST_CHAIN = 8
Cause = tuple[str, str, str, str]
"""State, reason, exception and traceback."""
_OWN = (__name__, "_sitebuiltins")
"""The modules of what stands in the place of sys.exit, and of exit()."""


class Leaving:
    """Watches the ways to leave.

    progress: a number that grows while the training goes on. on_failure: is called with the function that leaves with a
    status that means failure, while its variables are still there, and with the exception that it is handling.
    """

    def __init__(
        self, progress: Callable[[], int], on_failure: Callable[[FrameType, BaseException | None], Cause | None]
    ) -> None:
        self._progress, self._on_failure = progress, on_failure
        self._status: object = None
        self._seen = 0
        self.because: Cause | None = None
        """What was being handled when it was left with that status: what on_failure made of it."""

    def watch(self) -> None:
        """Puts itself around what raises; the functions are otherwise the same."""
        sys.exit = self._around(sys.exit)
        quitter = sys.modules.get("_sitebuiltins")  # absent under python -S
        if quitter is not None:
            quitter.Quitter.__call__ = self._around(quitter.Quitter.__call__)  # exit() and quit()

    @property
    def status(self) -> int | str | None:
        """A number, or the text that the interpreter prints; None where nothing was said."""
        return self._status if self._status is None or isinstance(self._status, int) else str(self._status)

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)  # by its name it can be pickled, as the target of a process that is spawned
        def exit(*arguments: object, **named: object) -> None:  # noqa: A001 - it stands for sys.exit
            try:
                original(*arguments, **named)
            except SystemExit as error:
                if threading.current_thread() is threading.main_thread():  # another thread's ends that thread
                    # whose exception it is: somebody may have patched sys.exit before us
                    with contextlib.suppress(Exception):
                        self._note(error, sys._getframe(1))
                raise

        return exit

    def _note(self, error: SystemExit, frame: FrameType) -> None:
        self._status, self._seen, self.because = error.code, self._progress(), None
        atexit.unregister(self._begin_exit)
        atexit.register(self._begin_exit)  # before those of the script, which may log
        if _means_failure(error.code):
            self.because = self._on_failure(frame, handled(error))

    def _begin_exit(self) -> None:
        if self._progress() > self._seen + 1:  # somebody caught it, and did more than to log once in a `finally`
            self._status = self.because = None


def handled(error: SystemExit) -> BaseException | None:
    """The exception in whose handler it was raised. Skips exceptions that are exits themselves (SystemExit, click's Exit), and
    returns what they wrap."""
    link: BaseException = error
    for _ in range(_LONGEST_CHAIN):
        context = link.__context__
        if context is None or isinstance(context, GeneratorExit) or not _is_near(link, context):
            break
        if not (isinstance(context, SystemExit) or type(context).__name__ in EXITS):
            return context
        link = context
    return None


def _is_near(error: BaseException, context: BaseException) -> bool:
    """Whether the function that handles an exception is one of the innermost that raised another."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    # one that is in the midst of being raised has no more than its innermost
    outer = frames[0].f_back if frames else None
    while outer is not None and len(frames) < _NEAR:
        frames.insert(0, outer)
        outer = outer.f_back
    near = [frame for frame in frames[-_NEAR:] if frame.f_globals.get("__name__") not in _OWN]
    return context.__traceback__ is not None and context.__traceback__.tb_frame in near


def _means_failure(status: object) -> bool:
    """As the interpreter reads it; what is no number is printed, and never compared here: it may be a tensor."""
    return status != 0 if issubclass(type(status), int) else status is not None
