"""Finds out why a process ended, from the exception that ended it.

Nothing is imported here when it runs: after Ctrl-C an import at exit turns exit code 130 into 1.
"""

from __future__ import annotations

import errno
import linecache
import tokenize  # noqa: F401 - linecache imports it when it reads a file
from types import FrameType

__all__ = ["cause", "of_exit_code", "out_of_memory", "text_of", "unused_parameters"]

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


def of_exit_code(code: int, said: str = "") -> tuple[str, str]:
    """State and reason of a process that ended with such a code, and with these words."""
    if code == _TERMINATED:
        return "preempted", f"exit code {code}, which stands for SIGTERM{said}"
    return ("failed", f"exit code {code}{said}") if code else ("finished", "")


def cause(error: BaseException) -> tuple[str, str, str, str]:
    """State, reason, exception and traceback of a process that an exception ended."""
    name = type(error).__name__
    try:
        message = text_of(error).strip()
        ending = "oom" if _memory_ran_out(error) else "failed"
        first = _first_words(message)[:500] if message else name
        first += _WITHOUT_GUARD if _lacks_guard(error) else ""
        return ending, name if first == name else f"{name}: {first}", name, _traceback(error)
    except Exception:  # noqa: BLE001 - without memory, or with somebody else's properties: the end must be reported all the same
        return "failed", name, name, ""


def _first_words(message: str) -> str:
    """The first line; of an error that torch carries over from a loader's worker, which only says where it was caught,
    also the last one, which says what it was."""
    first, *rest = message.splitlines()
    return f"{first} {rest[-1]}" if _CARRIED in rest else first


def text_of(error: BaseException) -> str:
    """What an exception says; the name of its type where its own `__str__` fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - see above
        return type(error).__name__


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
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") != module:
        trace = trace.tb_next
    return None if trace is None else trace.tb_frame


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
    text = text_of(error).lower()
    return any(words in text for words in _NO_MEMORY)


def _memory_ran_out(error: BaseException | None) -> bool:
    """The same of the exception or of what it came from."""
    seen = 0
    while error is not None and seen < 8:
        if out_of_memory(error):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def _traceback(error: BaseException, limit: int = 50) -> str:
    """The traceback as text, like Python's own but by hand: the traceback module imports more when it meets certain
    frames."""
    parts: list[str] = []
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain and len(chain) < 8:
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    for one in reversed(chain):
        lines = ["Traceback (most recent call last):"]
        frames = []
        trace = one.__traceback__
        while trace is not None:
            frames.append((trace.tb_frame.f_code, trace.tb_lineno))
            trace = trace.tb_next
        for code, number in frames[-limit:]:
            lines.append(f'  File "{code.co_filename}", line {number}, in {code.co_name}')
            source = linecache.getline(code.co_filename, number).strip()
            if source:
                lines.append(f"    {source}")
        lines.append(f"{type(one).__name__}: {text_of(one)}"[:2000])
        parts.append("\n".join(lines))
    return "\n\nDuring handling of the above exception, another exception occurred:\n\n".join(parts)[-20_000:]
