"""Finds out from console output how a job ended: by an exception, by a signal, or killed by the kernel or the scheduler.

With several ranks, the rank that failed first counts; a rank that only lost its connection to another one does not. Within a
rank the last error counts. An error is ignored if training went on after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from perfagent_client.history.console import unlabelled

__all__ = ["Ending", "ending"]

_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(
    r"^(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit|Failure|Timeout))(?:: ?(?P<said>.*))?$"
)
_RAISED = re.compile(r"^(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:: ?(?P<said>.*))?$")
"""An exception, by the names that most have; below a traceback by any name."""
_BEFORE = re.compile(
    r"^(?:[EF]\d{4} [\d:.]+ +\d+ \S+\] |\d{4}-\d\d-\d\d[T ][\d:.,]+ +(?:[-|] *)?|\[?(?:ERROR|CRITICAL|FATAL)\]?[: -]+)+"
)
"""A time, and how bad it is, as loggers put them before a line."""
_CONSEQUENCE = re.compile(
    r"ChildFailedError|SystemExit|KeyboardInterrupt|SignalException|ProcessExitedException|ncclRemoteError|Broken ?pipe|"
    r"[Cc]onnection (?:was )?(?:closed|reset) by|likely closed|communicator was aborted|EOFError"
)
"""What follows from another failure, where there is one."""
_GOES_ON = 3
"""Lines of progress after it: it was no end."""
_TRACE_LINES, _LONGEST_LINE = 60, 2000


@dataclass(frozen=True, slots=True)
class Ending:
    """state: "failed", "oom", "killed" or "preempted"; exception: its type, "" for a signal; traceback: as it was printed. line:
    its place; sure: 2 what says what happened, 1 what says only that something did."""

    state: str
    reason: str
    exception: str = ""
    traceback: str = ""
    line: int = 0
    sure: int = 2
    label: str = ""

    @property
    def rank(self) -> int:
        found = re.search(r"rank ?(\d+)", self.label)
        return int(found[1]) if found else 0

    @property
    def is_consequence(self) -> bool:
        return bool(_CONSEQUENCE.search(f"{self.exception} {self.reason}"))


def _signal(name: str) -> str:
    return f"killed by {name}"


_SYSTEM: tuple[tuple[re.Pattern[str], str, str, int], ...] = tuple(
    (re.compile(pattern), state, reason, sure)
    for pattern, state, reason, sure in (
        (
            r"oom[-_ ]kill|Out of memory: Kill|OOMKilled|OOM Killed|exceeded memory limit|MEMORY LIMIT|Memory cgroup out of",
            "oom",
            "",
            2,
        ),
        (r"Segmentation fault|\bSIGSEGV\b|exit ?code:? -11\b", "killed", _signal("SIGSEGV"), 2),
        (r"Bus error|\bSIGBUS\b|exit ?code:? -7\b", "killed", _signal("SIGBUS"), 2),
        (r"Illegal instruction|\bSIGILL\b", "killed", _signal("SIGILL"), 2),
        (r"Floating point exception|\bSIGFPE\b", "killed", _signal("SIGFPE"), 2),
        (r"Watchdog caught collective operation timeout", "failed", "", 2),
        (r"\bAborted\b.*core dumped|\bSIGABRT\b|exit ?code:? -6\b", "killed", _signal("SIGABRT"), 1),
        (r"DUE TO TIME LIMIT", "killed", "", 1),
        (r"DUE TO PREEMPTION|CANCELLED AT", "preempted", "", 1),
        (r"(?:^|line \d+: +\d+ )Killed\b|\bSIGKILL\b|exit ?code:? (?:-9|137)\b", "killed", _signal("SIGKILL"), 1),
        (r"Assertion [`'].+[`'] failed", "failed", "", 1),
        (r"can't open file .*: \[Errno 2\]|: command not found", "failed", "", 1),
        (r"srun: error: .*[Ee]xit(?:ed with exit)? code [1-9]", "failed", "", 0),
    )
)
_ANY = re.compile("|".join(pattern.pattern for pattern, *_ in _SYSTEM))
_QUOTED = re.compile(r"^\s*(?:['\"#({*|-]|\[(?![EFW]\d))")
"""Code, a list or a quotation that has such words in it."""
_THROWN = re.compile(r"terminate called after throwing an instance of '([\w:]+)'")
_WHAT = re.compile(r"^\s*what\(\):\s+(.*)")


def ending(lines: Sequence[str], is_progress: Callable[[str], bool]) -> Ending | None:
    """None where nothing says that it ended badly."""
    last, count = -1, 0  # before this line the training went on
    for place in range(len(lines) - 1, -1, -1):
        if is_progress(lines[place]) and (count := count + 1) == _GOES_ON:
            last = place
            break
    found = [one for one in _endings(lines) if one.line > last]
    causes = [one for one in found if not one.is_consequence] or found
    surest = [one for one in causes if one.sure == max(each.sure for each in causes)]
    newest = {one.label: one for one in surest}  # of each rank
    return min(newest.values(), key=lambda one: one.line, default=None)


def _endings(lines: Sequence[str]) -> Iterator[Ending]:
    open_: dict[str, list[str]] = {}  # rank -> the traceback that it prints
    thrown = ""
    for place, line in enumerate(lines):
        label, text = unlabelled(line)
        text = _BEFORE.sub("", text[:_LONGEST_LINE])
        if text.rstrip().endswith(_TRACEBACK):
            open_[label] = [_TRACEBACK]
            continue
        trace = open_.get(label)
        is_indented = text[:1].isspace() or not text
        found = None if is_indented else (_RAISED if trace else _EXCEPTION).match(text.rstrip())
        if found is not None:
            kind, said = found["kind"].rpartition(".")[2], (found["said"] or "").strip()
            reason = f"{kind}: {said}" if said else kind
            printed = "\n".join([*trace[-_TRACE_LINES:], text]) if trace else ""
            open_.pop(label, None)
            yield Ending("failed", reason[:2000], kind, printed, place, label=label)
        elif trace is not None and is_indented:
            trace.append(text)
        elif _THROWN.search(text):
            thrown = _THROWN.findall(text)[0]
        elif (what := _WHAT.match(text)) and thrown:
            yield Ending("failed", f"{thrown}: {what[1]}", thrown, line=place, label=label)
        elif _ANY.search(text) and not _QUOTED.match(text):
            state, reason, sure = next(row[1:] for row in _SYSTEM if row[0].search(text))
            said = f"{reason} ({text.strip()[:300]})" if reason else text.strip()[:500]
            yield Ending(state, said, line=place, sure=sure, label=label)
