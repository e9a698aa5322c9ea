"""Why a process ended, from the exception that ended it. Nothing is imported here when it runs: after Ctrl-C an import at exit
turns exit code 130 into 1."""

from __future__ import annotations

import linecache
import tokenize  # noqa: F401 - linecache imports it when it reads a file

__all__ = ["cause"]


def cause(error: BaseException) -> tuple[str, str, str, str]:
    """State, reason, exception and traceback of a process that an exception ended."""
    name = type(error).__name__
    message = str(error)
    ending = "oom" if _out_of_memory(error) else "failed"
    first = message.strip().splitlines()[0][:500] if message.strip() else ""
    return ending, f"{name}: {first}" if first else name, name, _traceback(error)


def _out_of_memory(error: BaseException | None) -> bool:
    seen = 0
    while error is not None and seen < 8:
        names = {kind.__name__ for kind in type(error).__mro__}
        if names & {"OutOfMemoryError", "MemoryError"}:
            return True
        text = str(error).lower()
        if isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def _traceback(error: BaseException, limit: int = 50) -> str:
    """The traceback as text, like Python's own but by hand: the traceback module imports more when it meets certain frames."""
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
        lines.append(f"{type(one).__name__}: {one}"[:2000])
        parts.append("\n".join(lines))
    return "\n\nDuring handling of the above exception, another exception occurred:\n\n".join(parts)[-20_000:]
