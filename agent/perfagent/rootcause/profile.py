"""torch.profiler for a few steps, begun and ended between steps on the training thread, because asked for.

Nothing of it exists until a command comes. Kineto allows one profiler a process: where the script has its own running, ours is
refused; where the script starts its own while ours runs, ours gives way at once. What is recorded is read, written and sent by
the sender's thread. What training computes is the same; its speed, while the profiler runs and when it stops, is not.
"""

from __future__ import annotations

import contextlib
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfagent.rootcause.upload import Upload

if TYPE_CHECKING:
    from perfagent.rootcause.investigator import Investigator

__all__ = ["MOST_STEPS", "Profile"]

MOST_STEPS = 100
MOST_EVENTS = 3_000_000
MOST_TRACE_BYTES = 64 * 2**20
WAIT_S = 600.0
OLD_S = 86_400.0
_REFUSED_ACTIVE = (
    "the script has a torch profiler of its own running, and only one can run in a process; ask again when it has ended"
)


class Profile:
    """One profile of `steps` steps. done: nothing more will come of it; problem: why it came to nothing, in a sentence."""

    def __init__(self, investigator: Investigator, command: str, steps: int, options: dict[str, bool]) -> None:
        self._investigator, self.command, self._steps, self._options = investigator, command, steps, options
        self.id = uuid.uuid4().hex
        self.done = False
        self.problem = ""
        self._asked = time.monotonic()
        self._profiler: Any = None
        self._annotation: Any = None
        self._first = self._last = 0
        self._began = self._ended = 0
        self._undo: list[Callable[[], None]] = []
        self._recorded = False
        self._upload: Upload | None = None

    # ---- on the training thread

    def at_boundary(self) -> bool:
        """Starts at the first boundary, ends `steps` later."""
        if self.done or self._recorded:
            return False
        try:
            if self._profiler is None:
                return self._start()
            self._mark()
            self._last = self._investigator.progress.completed
            if self._last - self._first + 1 < self._steps:
                self._name_step()
                return True
            self._stop()
        except Exception as error:  # noqa: BLE001 - a profiler that fails must be gone, and its failure told
            self._abandon(f"the profiler failed: {type(error).__name__}: {error}")
        return False

    def _start(self) -> bool:
        torch = sys.modules["torch"]
        if torch.autograd._profiler_enabled():
            self._abandon(_REFUSED_ACTIVE)
            return False
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(
            activities=kinds, record_shapes=self._options.get("shapes", False), profile_memory=self._options.get("memory", False),
            with_stack=self._options.get("python", False),
        )  # fmt: skip
        self._first = self._investigator.progress.completed + 1
        self._give_way()
        self._profiler = profiler
        profiler.start()
        self._began = time.time_ns()
        self._name_step()
        return True

    def _name_step(self) -> None:
        torch = sys.modules["torch"]
        self._annotation = torch.autograd.profiler.record_function(f"ProfilerStep#{self._investigator.progress.completed + 1}")
        self._annotation.__enter__()

    def _mark(self) -> None:
        annotation, self._annotation = self._annotation, None
        if annotation is not None:
            annotation.__exit__(None, None, None)

    def _stop(self) -> None:
        self._ended = time.time_ns()
        self._take_back()
        self._profiler.stop()
        self._recorded = True

    def _give_way(self) -> None:
        """While ours runs: whoever prepares another profiler ends ours first, instead of being refused."""
        module = sys.modules["torch"].autograd.profiler
        for name in ("_prepare_profiler", "_enable_profiler"):
            original = getattr(module, name, None)
            if original is not None:
                self._undo.append(_replace(module, name, original, self._yield_to_user))

    def _yield_to_user(self) -> None:
        if self._profiler is None or self._recorded or self.done or self._ours_is_starting():
            return
        with contextlib.suppress(Exception):
            self._mark()
            self._profiler.stop()
        self._abandon("the script started a torch profiler of its own, and only one can run in a process")

    def _ours_is_starting(self) -> bool:
        return not self._began

    def _take_back(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _abandon(self, why: str) -> None:
        self._take_back()
        self.problem = why
        self.done = True

    def close(self) -> None:
        """The training ends. On its thread: what is running is stopped."""
        if self._profiler is not None and not self._recorded and not self.done:
            with contextlib.suppress(Exception):
                self._mark()
                self._profiler.stop()
        if not self.done and not self._recorded:
            self._abandon(f"the training ended before its {self._steps} steps were over")

    # ---- on the sender's thread

    def poll(self) -> None:
        """Works out what was recorded, once; then sends it piece by piece."""
        if self.done:
            return
        if not self._recorded:
            if self._profiler is None and time.monotonic() - self._asked > WAIT_S:
                self._abandon(f"no step ended within {WAIT_S:.0f} s")
            return
        if self._upload is None:
            try:
                self._upload = self._work_out()
            except Exception as error:  # noqa: BLE001 - told, and over
                self._abandon(f"what was recorded could not be read: {type(error).__name__}: {error}")
                return
        if self._upload.poll():
            self.problem = self._upload.problem
            self.done = True

    def _work_out(self) -> Upload:
        from perfagent.rootcause import trace

        profiler, self._profiler = self._profiler, None
        folder = _folder(self._investigator.sender.config.state_dir)
        plain, packed = folder / f"{self.id}.json", folder / f"{self.id}.json.gz"
        summary: dict[str, Any] = {
            "profile": self.id, "command": self.command, "first_step": self._first, "last_step": self._last,
            "duration_s": (self._ended - self._began) / 1e9,
        }  # fmt: skip
        events = profiler.profiler.kineto_results.events()
        if len(events) <= MOST_EVENTS:
            cpu, device = trace.record(events)
            steps = [one for one in cpu if one.name.startswith("ProfilerStep#")]
            summary["operators"] = trace.operators(cpu)
            if steps:
                began, ended = min(one.start for one in steps), max(one.end for one in steps)
                inside = [one for one in cpu if began <= one.start and one.end <= ended]
                summary["gaps"] = trace.gaps(inside, [one for one in device if one[0] >= began], steps[0].thread, began, ended)
        summary["events"] = len(events)
        del events
        try:
            profiler.export_chrome_trace(str(plain))
            sizes = trace.compress(plain, packed)
        finally:
            plain.unlink(missing_ok=True)
        if sizes[1] > MOST_TRACE_BYTES:
            packed.unlink()
            most = MOST_TRACE_BYTES >> 20
            summary["trace_left_out"] = f"the trace has {sizes[1] >> 20} MiB; up to {most} are sent: ask for fewer steps"
            return Upload(self._investigator.sender, summary, None, step=self._last)
        summary["trace_bytes"], summary["plain_bytes"] = sizes[1], sizes[0]
        return Upload(self._investigator.sender, summary, packed, step=self._last)


def _replace(module: Any, name: str, original: Callable[..., Any], first: Callable[[], None]) -> Callable[[], None]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    setattr(module, name, watched)

    def undo() -> None:
        if getattr(module, name) is watched:
            setattr(module, name, original)

    return undo


def _folder(state_dir: Path) -> Path:
    """Where traces lie until they are sent; what a killed process left there goes after a day."""
    folder = state_dir / "profiles"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for left in folder.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > OLD_S:
                left.unlink()
    return folder
