"""Runs torch.profiler for a few steps on request, begun and ended between steps on the training thread.

Kineto allows one profiler a process: where the script has its own running, ours is refused; where the script starts its
own while ours runs, ours gives way. What is recorded is read, written and sent by the sender's thread. What training
computes is the same; its speed, while the profiler runs and when it stops, is not.

Kineto keeps every operator in memory until it is stopped, and only the thread that started it can stop it. On any other,
torch 2.13 says that nothing runs, goes on recording, and what it gives ends the process when it is read. An evaluation,
or what follows the last step, may be without end: an evaluation of a small model was recorded with 150 MB a second. So
while a profile runs, and only then, it is asked wherever its thread passes one of our hooks whether it is enough.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from threading import Event, get_ident, get_native_id
from typing import IO, TYPE_CHECKING, Any

from perfagent.boundary.call_watch import replace
from perfagent.boundary.dynamo import keep_out_of_frames
from perfagent.causes.upload import Upload
from perfagent.device import accelerator
from perfagent.measure import other_profilers
from perfagent.samplers.process import ProcessReader
from perfagent.step.state import lives, state

if TYPE_CHECKING:
    from perfagent.causes.watch import Watch
    from perfagent.wire.evidence import Reason

__all__ = ["MOST_STEPS", "Profile", "Summary"]

Summary = dict[str, Any]
"""What the event of a profile holds."""

MOST_STEPS = 100
MOST_TRACE_BYTES = 64 * 2**20
MOST_S = 60.0
"""So long is recorded; what is longer is cut short."""
MOST_GROWTH_BYTES = 128 * 2**20
"""So much may the process grow meanwhile. Measured with torch 2.13: 230 bytes an operator while it is recorded, and
seven times that once it is stopped: 1 GB then, and the training stands still for 2 s. (1 GB of records became 6.6 GB,
and 28 s.)"""
WAIT_S = 600.0
GIVE_WAY_S = 1.0
"""So long a profiler of the script's, started on another thread, waits until ours has ended on its own."""
_OF_STEPS = ("comm", "h2d")
"""Phases in the middle of a step: what the process is larger by there are the step's own tensors."""
_GROWTH_EVERY_S = 0.1  # reading it takes some 10 µs, and an evaluation passes here ten thousand times a second


def _rss_bytes() -> float:
    return ProcessReader().memory().get("process/rss_bytes", 0.0)


class Profile:
    """One profile of `steps` steps. done: nothing more will come of it; problem: why it came to nothing;
    cut_short: why it holds less than was asked for; summary: what was recorded, once it is worked out.

    rss_bytes: gives the size of the process.
    """

    def __init__(
        self, watch: Watch, command: str, steps: int, options: dict[str, bool], *,
        clock: Callable[[], float] = time.monotonic, rss_bytes: Callable[[], float] = _rss_bytes,
    ) -> None:  # fmt: skip
        self._watch, self.command, self._steps, self._options = watch, command, steps, options
        self.id = uuid.uuid4().hex
        self.done = False
        self.problem: Reason = {}
        self.cut_short: Reason = {}
        self.summary: Summary = {}
        self._clock, self._rss_bytes = clock, rss_bytes
        self._asked = clock()
        self._profiler: Any = None
        self._annotation: Any = None
        self._first = self._last = 0
        self._began = self._ended = 0
        self._thread = self._native = 0
        self._is_recorded = self._is_overtaken = False
        self._stopped = Event()
        self._until = self._look_at = 0.0
        self._size = 0.0
        self._undo: list[Callable[[], None]] = []
        self._upload: Upload | None = None

    # ---- on the training thread

    def at_boundary(self) -> bool:
        """Starts at the first boundary, ends `steps` later."""
        if self._is_running() and get_native_id() != self._native:
            if not self.done:
                self._end({"key": "another_thread"})
            return not self._is_orphan()
        if self.done:
            self._discard()
        if self.done or self._is_recorded:
            return False
        return self._tried(self._start if self._profiler is None else self._end_step)

    def _is_running(self) -> bool:
        return self._began > 0 and self._profiler is not None and not self._is_recorded

    def _tried(self, act: Callable[[], bool], key: str = "profiler_failed") -> bool:
        """What `act` says; False where it raised: a profiler that fails must be gone, and its failure reported."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - Kineto raises anything
            self._end({"key": key, "error": f"{type(error).__name__}: {error}"[:1000]})
            return False

    def _start(self) -> bool:
        torch = sys.modules["torch"]
        if other_profilers.in_use():
            self._end({"key": "other_profiler"})
            return False
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if (backend := accelerator()).in_use():
            named = torch.profiler.ProfilerActivity
            kinds.append(getattr(named, backend.kind.upper(), named.PrivateUse1))
        profiler = torch.profiler.profile(
            activities=kinds, record_shapes=self._options.get("shapes", False), profile_memory=self._options.get("memory", False),
            with_stack=self._options.get("python", False),
        )  # fmt: skip
        self._first = self._watch.progress.completed + 1
        self._thread, self._native = get_ident(), get_native_id()
        # while ours runs: whoever prepares another profiler ends ours first, instead of being refused
        self._profiler = profiler
        self._undo += [replace(module, name, self._yield_to_user) for module, name in other_profilers.starts()]
        self._watch_the_way()
        profiler.start()
        self._began = time.time_ns()
        self._size, self._until = self._rss_bytes(), self._clock() + MOST_S  # now: the first start loads CUPTI
        self._name_step()
        return True

    def _end_step(self) -> bool:
        self._mark()
        if self._whole() >= self._steps:
            self._stop()
            return False
        if self._stopped_by_a_limit():
            return False
        self._name_step()
        return True

    def _whole(self) -> int:
        """How many steps were recorded from their beginning to their end."""
        return self._watch.progress.completed - self._first + 1

    def _name_step(self) -> None:
        name = f"ProfilerStep#{self._watch.progress.completed + 1}"
        self._annotation = sys.modules["torch"].autograd.profiler.record_function(name)
        self._annotation.__enter__()

    def _mark(self) -> None:
        annotation, self._annotation = self._annotation, None
        if annotation is not None:
            annotation.__exit__(None, None, None)

    def _stop(self) -> None:
        self._last = max(self._first, self._watch.progress.completed)
        self._ended = time.time_ns()
        self._take_back()
        self._profiler.stop()
        self._is_recorded = True

    # ---- on the training thread, between two ends of a step

    def _watch_the_way(self) -> None:
        """Has `passing` called before evaluations, phases and fetches. Put round our hooks instead of into them: where
        nothing is profiled, which is nearly always, they do not even ask. Each place says whether an evaluation begins
        there."""
        from perfagent.hooks import forward, phases
        from perfagent.hooks.selection import auxiliary_models

        loading = sys.modules.get("torch.utils.data.dataloader")
        places: list[tuple[Any, str, Callable[..., bool | None]]] = [
            *((calls, "evaluated", lambda _p, training, *_: not training) for calls in (forward, auxiliary_models)),
            *((calls, "interrupted", lambda *_: True) for calls in (forward, auxiliary_models)),
            (phases.Span, "__enter__", lambda span: None if span._name in _OF_STEPS else span._name == "eval"),
            # below the hook on __next__, which looks at the frame that called it
            (getattr(loading, "_SingleProcessDataLoaderIter", None), "_next_data", lambda *_: False),
            (getattr(loading, "_MultiProcessingDataLoaderIter", None), "_next_data", lambda *_: False),
            (sys.modules["torch"].autograd, "_engine_run_backward", lambda *_: None),  # also after the run's end
        ]
        self._undo += [
            replace(owner, name, self._asking(evaluates)) for owner, name, evaluates in places if hasattr(owner, name)
        ]
        keep_out_of_frames()

    def _asking(self, evaluates: Callable[..., bool | None]) -> Callable[..., None]:
        def passing(*args: object, **_: object) -> None:
            if get_native_id() != self._native or not self._is_running():
                return
            if self.done:
                self._discard()
            elif state.current is self._watch.progress:  # else: a forked child
                evaluation = evaluates(*args)
                if evaluation is not None:
                    self._tried(self._before_evaluation if evaluation and self._whole() else self._stopped_by_a_limit)

        return passing

    def _before_evaluation(self) -> bool:
        """Ends the profile, unless its first step is not over: one that begins with an evaluation, or has one in every
        step (a rollout), holds that as a part of the step."""
        self._cut("evaluation")
        return True

    def _stopped_by_a_limit(self) -> bool:
        at = self._clock()
        if at >= self._until:
            self._cut("time", s=MOST_S)
            return True
        if at < self._look_at:
            return False
        self._look_at = at + _GROWTH_EVERY_S
        grown = self._rss_bytes() - self._size
        if grown < MOST_GROWTH_BYTES:
            return False
        self._cut("size", bytes=int(grown))
        return True

    def _cut(self, why: str, **limit: float) -> None:
        self._mark()
        self.cut_short = {"key": f"cut_short_{why}", **limit, "whole": self._whole(), "of": self._steps}
        self._stop()

    # ---- an end before its time

    def _yield_to_user(self, *_: object, **__: object) -> None:
        if not self._is_running():  # it may be ours that starts
            return
        self._end(self.problem or {"key": "gave_way"})
        self._is_overtaken = not self._stopped.wait(GIVE_WAY_S)

    def close(self) -> None:
        """The training ends."""
        if not self.done and not self._is_recorded:
            self._end({"key": "training_ended", "of": self._steps})

    def _end(self, why: Reason) -> None:
        """Ends it here, or where the thread that began it passes next."""
        self.problem, self.done = why, True
        if get_native_id() == self._native or self._is_orphan():
            self._discard()

    def _is_orphan(self) -> bool:
        """True if the thread that began it has ended, and perhaps the calling one got its ident."""
        return not lives(self._thread) or (get_ident() == self._thread and get_native_id() != self._native)

    def _discard(self) -> None:
        """On the thread that began it. If that has ended, nobody can stop the profiler, which records nothing more."""
        is_orphan = self._is_orphan()
        if self._profiler is None or not (is_orphan or get_native_id() == self._native):
            return
        self._take_back()
        profiler, self._profiler = self._profiler, None
        with contextlib.suppress(Exception):
            if self._is_overtaken:  # stopping it now would end the process (other_profilers.py): it records no more
                profiler.profiler.toggle_collection_dynamic(False, [sys.modules["torch"].profiler.ProfilerActivity.CPU])
            elif not is_orphan:
                self._mark()
                profiler.stop()
            profiler.profiler.entered = False  # else it would be taken for one of the script's
        self._stopped.set()

    def _take_back(self) -> None:
        while self._undo:
            self._undo.pop()()

    # ---- on the sender's thread

    def poll(self) -> None:
        """Works out what was recorded, once; then sends it piece by piece."""
        if not self.done and not self._is_recorded:
            if self._profiler is None and self._clock() - self._asked > WAIT_S:
                self._end({"key": "no_step_ended", "wait_s": WAIT_S})
        elif not self.done and (self._upload or self._tried(self._work_out, "records_unread")):
            assert self._upload is not None
            if self._upload.poll():
                self.problem, self.done = self._upload.problem, True

    def _work_out(self) -> bool:
        profiler, self._profiler = self._profiler, None
        cut = {"cut": self.cut_short} if self.cut_short else {}
        summary = self.summary = {
            "profile": self.id, "command": self.command, "first_step": self._first, "last_step": self._last,
            "duration_s": (self._ended - self._began) / 1e9, **cut,
        }  # fmt: skip
        events = profiler.profiler.kineto_results.events()
        summary |= self._summed_up(events) | {"events": len(events)}
        del events
        file: IO[bytes] | None = None
        try:
            file, plain_bytes, trace_bytes = self._write(profiler)
            if trace_bytes > MOST_TRACE_BYTES:
                file = None
                summary["no_trace"] = {"key": "trace_too_large", "bytes": trace_bytes, "most_bytes": MOST_TRACE_BYTES}
            else:
                summary |= {"plain_bytes": plain_bytes, "trace_bytes": trace_bytes}
        except OSError as error:  # a full disk: the operators do not need it
            summary["no_trace"] = {"key": "trace_unwritten", "error": error.strerror or ""}
        self._upload = Upload(self._watch.sender, summary, file, step=self._last)
        return True

    def _summed_up(self, events: Any) -> dict[str, Any]:
        """The operators; of whole steps also the gaps, and how their time is divided."""
        from perfagent.causes import trace

        records = trace.record(events)
        found: dict[str, Any] = {"operators": trace.operators(records.cpu)}
        # not the one that was cut off
        names = {f"ProfilerStep#{step}" for step in range(self._first, self._last + 1)}
        steps = [one for one in records.cpu if one.name in names]
        if steps:
            began, ended, thread = min(one.start for one in steps), max(one.end for one in steps), steps[0].thread
            inside = [one for one in records.cpu if began <= one.start and one.end <= ended]
            device = [one for one in records.device if one[0] >= began]
            found["gaps"] = trace.gaps(inside, device, thread, began, ended)
            found["shares"] = trace.shares(trace.Records(inside, device, records.collectives), thread, began, ended)
        return found

    def _write(self, profiler: Any) -> tuple[IO[bytes], int, int]:
        """The trace as a compressed file without a name, and its bytes before and after. Raises OSError."""
        from perfagent.causes import trace

        folder = self._watch.sender.config.state_dir
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(prefix="profile-", dir=folder) as written:
            plain = Path(written) / "trace.json"
            packed = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it is sent later
            profiler.export_chrome_trace(str(plain))
            if not plain.exists():  # Kineto raises nothing
                raise OSError
            return packed, trace.compress(plain, packed), packed.tell()
