"""`perfagent.Checkpoint`: when a training is saved, how many are kept, and where it goes on.

    checkpoint = perfagent.Checkpoint("runs/a", every=500, keep=3, best="min", asynchronous=True)
    loop = perfagent.loop(model, optimizer, checkpoint=checkpoint)
    loop.resume()

Without a loop: `checkpoint.save(step, state)` and `checkpoint.load_latest()`. How a checkpoint is written is in
saving.py, what makes it whole in manifest.py and folder.py, how it is read in resume.py."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import threading
import time
import weakref
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from perfagent.errors import CheckpointError, ConfigError, PerfagentError
from perfagent.session import current, resumed_at
from perfagent.step.state import unwatched
from perfagent_loop.checks import check_choice, check_count
from perfagent_loop.collectives import Agreement, Ranks
from perfagent_loop.emergency import Emergency
from perfagent_loop.events import count, phase, tell
from perfagent_loop.folder import Folder, FolderUse, folder_use
from perfagent_loop.kinds import Engine, State
from perfagent_loop.manifest import Manifest
from perfagent_loop.retry import retry
from perfagent_loop.saving import Parts, is_fatal, newest_whole, read, split, write
from perfagent_loop.snapshot import Copier, check_loadable, has_shards

if TYPE_CHECKING:
    from perfagent_loop.loop import Loop

__all__ = ["Checkpoint"]

logger = logging.getLogger("perfagent")
ARRIVE_S = 10.0
"""How long ranks wait for each other after an exception, before they give up saving."""


class Checkpoint:
    """Saves a training into a folder: every so many steps, at SIGTERM, and at an uncaught exception.

    Every rank makes one and calls its methods: saving and loading are collectives.

    Args:
        folder: The folder. All ranks must see it, and no other training may use it.
        every: Optimizer steps between two saves. None saves only when asked, and in an emergency.
        keep: How many of the newest checkpoints stay. With two or more there is one to fall back to.
        best: "min" or "max" also keeps the checkpoint with the best metric.
        asynchronous: True lets the training wait only while the state is copied to host memory. Not for DeepSpeed.
        emergency: True also saves at SIGTERM and at an uncaught exception; handlers that were there are called, too.
        grace_s: How many seconds a signal waits for the end of the step.
        tries: How often a save is tried, if the error may pass by itself.
        tolerate: How many failed saves in a row the training survives. Each is an alert, one more raises.

    Raises:
        ConfigError: A value cannot be used.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int | None = None,
        *,
        keep: int = 3,
        best: Literal["min", "max"] | None = None,
        asynchronous: bool = False,
        emergency: bool = True,
        grace_s: float = 30.0,
        tries: int = 3,
        tolerate: int = 2,
    ) -> None:
        if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
            raise ConfigError(f"folder must be the path of a folder such as 'runs/a', not {folder!r:.80}")
        check_count("every", every, or_none=True)
        check_count("keep", keep)
        check_count("tries", tries)
        check_count("tolerate", tolerate, least=0)
        check_choice("best", best, ("min", "max"), or_none=True)
        if not isinstance(grace_s, (int, float)) or not 0 < grace_s < math.inf:
            raise ConfigError(f"grace_s must be a number of seconds above 0, not {grace_s!r:.80}")
        path = Path(folder).expanduser().absolute()
        if path.exists() and not path.is_dir():
            raise ConfigError(f"folder must be a folder, and {path} is a file; name another, or remove it")
        self._folder = Folder(path)
        self._damaged: list[Path] = []
        self._use: FolderUse | None = None
        self._warned = False
        self._every, self._keep, self._best, self._asynchronous = every, keep, best, asynchronous
        self._tries, self._tolerate = tries, tolerate
        self._emergency = Emergency(self._exception, grace_s=float(grace_s)) if emergency else None
        self._agreement: Agreement | None = None
        self._copier: Copier | None = None
        self._loop: weakref.ref[Loop] | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._failures = 0
        self._metric: float | None = None
        self._last_step = -1

    @cached_property
    def _ranks(self) -> Ranks:
        return Ranks()  # a collective: at the first save, load or step

    def save(
        self, step: int, state: State, *, metric: float | None = None, engine: Engine = None, reason: str = "asked"
    ) -> None:
        """Saves a state under a step. Waits for the save before it.

        Args:
            step: The number of optimizer steps so far.
            state: Tensors, numbers, text, and containers of them. "rng", "sampler" and "loop" are each rank's own,
                DTensors below "model" and "optimizer" are saved in pieces, everything else is rank 0's.
            metric: The value that `best` compares.
            engine: A DeepSpeed engine, which saves its own model and optimizer.
            reason: A word that is recorded with the checkpoint.

        Raises:
            ConfigError: The state could not be loaded again.
            CheckpointError: This save failed, or an asynchronous one before it.
        """
        check_count("step", step, least=0)
        check_loadable(state)
        with phase("checkpoint"):
            self.wait()
            if self._ranks.first and self._use is None:
                self._used_beside(begins=True)
            sharded = has_shards({name: state.get(name) for name in ("model", "optimizer")})
            parts = split(state, sharded=sharded)
            place, run = state.get("loop"), current()
            run_id = place.get("run_id") if isinstance(place, dict) else None
            if run_id is None and run is not None:
                run_id = run.id
            kind = "deepspeed" if engine is not None else "sharded" if sharded else "plain"
            metric, self._metric = (self._metric if metric is None else float(metric)), None
            world = self._ranks.world
            draft = Manifest(step=step, kind=kind, world_size=world, reason=reason, run=run_id, metric=metric)
            if self._asynchronous and engine is None:
                given = (self._copied(parts), draft)
                self._thread = threading.Thread(None, self._write_aside, "perfagent-checkpoint", given, daemon=False)
                self._thread.start()
            else:
                self._write(parts, draft, engine)
        self._last_step = step

    def wait(self) -> None:
        """Waits until no save is in progress. Raises CheckpointError, once, if the save failed."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def rate(self, metric: float) -> None:
        """Gives the next checkpoint its metric, such as the loss of an evaluation, for `best`."""
        self._metric = float(metric)

    def close(self) -> None:
        """Waits for the save in progress, and removes the handlers.

        Raises:
            CheckpointError: The save failed.
        """
        if self._emergency is not None:
            self._save_for_late_signal(self._emergency)
            self._emergency.remove()
        try:
            self.wait()
        finally:
            for made in (self._agreement, self._copier):
                if made is not None:
                    made.close()
            self._agreement = self._copier = self._loop = self._use = None
            if self._emergency is not None:
                self._emergency.release()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, (Exception, KeyboardInterrupt)):
            self._exception(error)
        self.close()

    def latest(self) -> Path | None:
        """The folder of the newest complete checkpoint, every file of which is verified; None without one. A
        collective."""
        found = newest_whole(self._folder, self._ranks)
        return None if found is None else found[0]

    def load_latest(self, into: State | None = None, *, engine: Engine = None) -> tuple[int, State] | None:
        """Loads the newest complete checkpoint. A collective. Loading never runs code from a file (`weights_only`).

        Args:
            into: For a sharded checkpoint, a state of the same shape, whose tensors are overwritten.
            engine: A DeepSpeed engine, which loads its own part.

        Returns:
            The step and the state, with tensors on the CPU. None if there is no checkpoint.
        """
        found = self._load(into, engine, None)
        return None if found is None else (found[0].step, found[1])

    def _load(self, into: State | None, engine: Engine, kind: str | None) -> tuple[Manifest, State] | None:
        """kind: what the model at hand can take, where that is known."""
        self.wait()
        found = newest_whole(self._folder, self._ranks)
        if found is None:
            return None
        path, manifest, self._damaged = found
        return manifest, read(path, manifest, self._ranks, into=into, engine=engine, kind=kind)

    def _load_for(self, loop: Loop) -> tuple[Manifest, State] | None:
        kind = {"fsdp2": "sharded", "deepspeed": "deepspeed"}.get(loop.strategy.kind, "plain")
        return self._load(loop.state_dict() if kind == "sharded" else None, loop.strategy.engine, kind)

    def after_step(self, loop: Loop) -> None:
        """Saves if it is time. A loop calls this after each optimizer step."""
        if self._loop is None:
            self._begin(loop)
        emergency, asked = self._emergency, 0
        if emergency is not None:
            asked = emergency.signum
            if self._agreement is not None:
                asked = self._agreement.look(asked, time.monotonic()) or 0
        if asked:
            self._save_and_leave(loop, asked)
        elif self._every is not None and not loop.step_count % self._every:
            self.save_loop(loop, reason="every")

    def save_loop(self, loop: Loop, *, metric: float | None = None, reason: str = "asked") -> None:
        """Saves a loop between two steps. A collective. A failure is an alert; after `tolerate` failures in a row it
        raises."""
        with self._tolerated():
            self.wait()  # the save before, which went on beside the training
        with self._tolerated():
            self.save(loop.step_count, loop.state_dict(), metric=metric, engine=loop.strategy.engine, reason=reason)

    def save_at_stop(self, loop: Loop) -> None:
        """Saves what the last step left, when the run is stopped from outside. A collective.

        It is never the best checkpoint. Weights that contain NaN are not saved, so that the checkpoint before stays the
        newest."""
        self._metric = None
        self._settle(loop, "stopped")

    def _settle(self, loop: Loop, reason: str) -> None:
        """The last step is saved, and no save is under way any more."""
        if self._last_step != loop.step_count:
            self._now(loop, reason)
        with contextlib.suppress(CheckpointError):  # a save that was under way; it was logged
            self.wait()

    def resume(self, loop: Loop) -> int | None:
        """Loads the newest complete checkpoint into a loop. A collective.

        Returns:
            The step of the checkpoint, or None if there is none.
        """
        with unwatched():  # loading a sharded optimizer steps it once without effect (torch's get_state_dict)
            found = self._load_for(loop)
            if found is None:
                return None
            manifest, state = found
            try:
                loop.load_state_dict(state)
            except (RuntimeError, ValueError, KeyError) as error:
                if isinstance(error, PerfagentError):
                    raise
                raise CheckpointError(  # a whole one of something else; torch says what differs
                    f"step_{manifest.step} in {self._folder.path} is whole, but does not fit this training: {error}; build "
                    "model, optimizer and scheduler as they were when it was saved, or name another folder"
                ) from error
        self._last_step = manifest.step
        beside = self._ranks.gather(self._used_beside(begins=False) if self._ranks.first else None)[0]
        # every rank reads the same one; while another process trains in it, the run is that one's
        run_id, run = None if beside else manifest.run, current()
        if run is None:
            resumed_at(run_id, manifest.step + 1)  # a run that is attached later takes it up
        else:
            run.continue_as(run_id, manifest.step + 1)
        tell("resumed", f"from step {manifest.step}", level="info")
        return manifest.step

    def roll_back(self, loop: Loop) -> int | None:
        """Loads weights, optimizer, scheduler and scaler of the newest complete checkpoint. Data and step count
        continue.

        Returns:
            The step of the checkpoint, or None if there is none. A collective.
        """
        with phase("checkpoint"), unwatched():
            found = self._load_for(loop)
            if found is None:
                return None
            manifest, state = found
            loop.strategy.load(loop.optimizer, state["model"], state["optimizer"])
            for name in ("scheduler", "scaler"):
                owner = getattr(loop, name)
                if state.get(name) is not None and hasattr(owner, "load_state_dict"):
                    owner.load_state_dict(state[name])
        return manifest.step

    def _begin(self, loop: Loop) -> None:
        """At a loop's first step: what could never be loaded is refused now, not after hours."""
        self._loop = weakref.ref(loop)
        check_loadable(loop.state_dict())
        problem = self._ranks.gather(self._folder.obstacle() if self._ranks.first else "")[0]
        if problem:
            raise ConfigError(f"no checkpoint can be written into {self._folder.path}: {problem}; name another folder")
        if self._ranks.first:
            self._used_beside(begins=True)
        if self._emergency is not None:
            self._emergency.install()
            if self._ranks.world > 1:
                self._agreement = Agreement(Ranks())

    def _save_and_leave(self, loop: Loop, signum: int) -> None:
        emergency = self._emergency
        assert emergency is not None
        self._settle(loop, "sigterm")
        run = current()
        if run is not None and not emergency.ends_the_process:
            run._sender.flush(1.0)
        emergency.pass_on(signum)

    def _save_for_late_signal(self, emergency: Emergency) -> None:
        """One that came after the last step. Not with several ranks: the others may not know of it."""
        loop = None if self._loop is None else self._loop()
        if not emergency.signum or loop is None or loop.step_count == self._last_step or loop.in_step:
            return
        if self._ranks.world == 1:
            self._now(loop, "sigterm")

    def _exception(self, error: BaseException) -> None:
        """An exception ends the process: saves what the last optimizer step left, where that is possible."""
        loop = None if self._loop is None else self._loop()
        if loop is None or isinstance(error, CheckpointError):
            return
        why = None
        if loop.step_count == self._last_step:
            why = "its last step is saved already"
        elif loop.in_step:
            why = "it broke off in the middle of an optimizer step"
        elif loop.strategy.engine is not None:
            why = "a DeepSpeed engine can only be saved while all of it works"
        # not over the group of a save that may be under way
        elif not (self._ranks if self._agreement is None else self._agreement.ranks).all_arrive(ARRIVE_S):
            why = "the other ranks did not come within 10 s"
        elif self._at_different_steps(loop):
            why = "the ranks are at different steps"
        if why is not None:
            tell("no emergency checkpoint", f"after {type(error).__name__}: {why}", level="info")
            return
        loop.discard_window()
        self._now(loop, "exception")

    def _now(self, loop: Loop, reason: str) -> None:
        """Saves while the training waits, whatever was said about saving beside it. Failures are logged, not raised."""
        asynchronous, self._asynchronous = self._asynchronous, False
        try:
            with contextlib.suppress(CheckpointError):  # this save is what counts now
                self.wait()
            self.save(loop.step_count, loop.state_dict(), engine=loop.strategy.engine, reason=reason)
            tell("emergency checkpoint", f"of step {loop.step_count}, because of {reason}", level="info", shown=True)
        except BaseException as problem:
            if is_fatal(problem):
                raise
            tell("emergency checkpoint failed", f"{type(problem).__name__}: {problem}", level="critical")
        finally:
            self._asynchronous = asynchronous

    def _used_beside(self, *, begins: bool) -> bool:
        """Whether another process trains in the folder: the user is warned once, and the training goes on all the same.
        begins: this one trains in it from here on."""
        use = folder_use(self._folder.path, begins=begins)
        if begins:
            self._use = use
        if use.other is not None and not self._warned:
            self._warned = True
            logger.warning(
                "perfagent: %s trains in the checkpoint folder %s already, and both write into it; the next start resumes "
                "from whichever saved last. Stop one of them, or give this training a folder of its own",
                use.other, self._folder.path,
            )  # fmt: skip
        return use.other is not None

    @contextlib.contextmanager
    def _tolerated(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self._failures += 1
            if self._failures > self._tolerate:
                raise
            tell("checkpoint failed", f"{error}; training goes on", level="critical")

    def _at_different_steps(self, loop: Loop) -> bool:
        if self._thread is not None:
            self._thread.join()
        return len(set(self._ranks.gather(loop.step_count))) > 1

    def _copied(self, parts: Parts) -> Parts:
        """What this rank writes, in memory that the training does not touch. The small things are copied as well."""
        if self._copier is None:
            self._copier = Copier()
        whole = {"own": parts.own, "shared": parts.shared if self._ranks.first else {}, "sharded": parts.sharded}
        return Parts(**self._copier.copy(whole))

    def _write_aside(self, parts: Parts, draft: Manifest) -> None:
        try:
            self._write(parts, draft, None)
        except BaseException as error:  # noqa: BLE001 - raised by wait(), on the training's thread
            self._failure = error
            # at once: a script that ends without close() would never hear of it
            logger.error("perfagent: %s", str(error))

    def _write(self, parts: Parts, draft: Manifest, engine: Engine) -> None:
        try:
            saved = retry(
                lambda: write(parts, draft, folder=self._folder, ranks=self._ranks, engine=engine),
                tries=self._tries if engine is None else 1,
                what=f"saving step {draft.step}",
                seeded=random.Random(draft.step),  # noqa: S311 - all ranks pause alike
            )
        except CheckpointError:
            count("checkpoint/failed", 1.0)
            raise
        self._failures = 0
        if self._ranks.first:
            count("checkpoint/saved_bytes", float(saved.manifest.total_bytes))
            count("checkpoint/save_s", saved.duration_s)
            try:
                self._damaged = [path for path in self._damaged if path != saved.path]
                self._folder.retain(self._keep, self._best, self._damaged)
            except OSError as error:
                tell("old checkpoints stay", f"{type(error).__name__}: {error}")
