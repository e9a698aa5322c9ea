"""Starts and ends a run, and watches what happens between: nothing here is called by a training script in its loop."""

from __future__ import annotations

import functools
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING, Any

from perfagent import patching
from perfagent.agent_config import AgentConfig
from perfagent.boundary import guard
from perfagent.calls.run_config import RunConfig
from perfagent.causes.investigator import Investigator
from perfagent.causes.stacks import frames_of
from perfagent.context.collector import Context
from perfagent.context.console import Console
from perfagent.context.environment import describe
from perfagent.decode.step_decoder import StepReader
from perfagent.delivery.sender import Sender
from perfagent.delivery.user_messages import Messages
from perfagent.hooks.evaluation import after_last_step
from perfagent.hooks.selection.joint_step import JointStep
from perfagent.hooks.selection.optimizers import OptimizerSelection
from perfagent.hooks.trained import Trained
from perfagent.identity import Identity
from perfagent.measure.gradient_schedule import GradientSchedule
from perfagent.measure.step_witness import StepWitness
from perfagent.media.outbox import Outbox
from perfagent.probes.compilations import Compilations
from perfagent.probes.memory_table import MemoryTable
from perfagent.probes.polling import Polling
from perfagent.probes.unmeasured_lines import UnmeasuredLines
from perfagent.process import host_allocator
from perfagent.process import launch_options as launched
from perfagent.process.exit_reason import Cause, Facts, cause, of_exit_code, text_of, unused_parameters
from perfagent.samplers.cgroup import oom_kills_of_host
from perfagent.samplers.process import count_started
from perfagent.samplers.sampler import Sampler
from perfagent.step.governor import Governor
from perfagent.step.roles import RunLinks
from perfagent.step.state import StepState, state

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["Lifecycle"]

EXIT_S = 1.5
"""What the end of a process may take for delivery; with the rest of the exit it stays below 2 s."""
MOST_THREADS_TOLD = 8
_NO_START = launched.Start()


class Lifecycle:
    """A run from its start to its end: what is measured meanwhile, and what is reported of it."""

    def __init__(
        self,
        settings: AgentConfig,
        *,
        name: str | None,
        config: dict[str, Any],
        tags: list[str],
        group: str | None,
        start_step: int | None,
        notes: str | None = None,
        start: launched.Start = _NO_START,
        sender: Sender | None = None,
    ) -> None:
        self.settings, self.config = settings, RunConfig(config)
        self._name, self._tags, self.group, self._notes = name, tags, group, notes
        self._pid = os.getpid()
        self.ended = False
        sender = sender or Sender(
            settings, Identity.from_environment(settings, name=name, start_step=start_step, start=start)
        )
        self._sender, self._identity = sender, sender.identity
        governor = Governor(settings.overhead_budget_pct)
        begin = start_step if start_step is not None else self._identity.start_step or 0
        # `start_step` is the number of the first step to come: what an older attempt has from there on is cut from view
        done = max(0, begin - 1)
        reader = StepReader()
        links = RunLinks(governor, reader.facts, self._identity.rank)
        self._progress = StepState(self._sender.rows, links, start_step=done)
        self._progress.selection = OptimizerSelection(self._progress)
        links.gradient_schedule = schedule = GradientSchedule(self._progress)
        links.joint_step = JointStep(self._progress, schedule)
        links.on_first_step, links.on_event, links.on_resumed = self._first_step, self._sender.event, self._goes_on_at
        self._trained = Trained(self._progress, self._sender)
        self._investigator = links.investigator = Investigator(self._progress, self._sender, self._trained.model)
        reader.investigator = self._investigator
        reader.gradients.on_nonfinite = self._investigator.witnessed
        links.on_late_loss = StepWitness(self._progress).measure
        self._sender.reader, self._sender.progress = reader, self._progress
        self._progress.off = self._sender.disabled
        self._messages = Messages(self._sender)
        self._media = Outbox(self._sender)
        self._polling = Polling(self._progress, self._sender, governor, self._trained, self._investigator)
        self._given_step = -1
        self._given: tuple[str, ...] = ()
        """Step and names of the last log() that named its step."""
        self._ending: tuple[str, str | Facts, dict[str, object]] | None = None
        """How the run ends, from the moment on that its end has begun."""
        self._last_value = getattr(sys, "last_value", None)
        self._compilations = Compilations(self._sender, self._progress)
        self._threads_told = 0
        self._oom_kills: int | None = None
        self._console: Console | None = None
        self._sampler: Sampler | None = None
        self._context = Context(self._sender, self.config, self._trained.model, self._trained.optimizer)

    @property
    def id(self) -> str | None:
        """The run's id; None on a rank that has not yet learned it from rank 0."""
        return self._identity.run

    @property
    def called(self) -> str:
        """Its name and id, for a sentence."""
        name = self._name or self._default_name()
        words = [*([repr(name)] if name else []), *([f"({self.id})"] if self.id else [])]
        return " ".join(words) or "of this rank"

    @property
    def start_step(self) -> int | None:
        """The number of its first step, where that was given: by the script, a checkpoint, or rank 0."""
        return self._identity.start_step

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child of the process that made it: the run is silent here."""
        return self._pid != os.getpid()

    # ---- starting

    def start_at(self, start_step: int) -> None:
        """The first step to come has that number: given by a training that was resumed before it made one."""
        p = self._progress
        p.completed = p.measure_at = max(0, start_step - 1)
        p.logs.early_step = max(p.logs.early_step, start_step)
        self._identity.start_step = start_step
        self._sender.event("state", {"state": "starting", "start_step": start_step})

    def continue_as(self, run_id: str | None, start_step: int | None, *, given: bool = False) -> None:
        """Continues an earlier run before the first step: as a new attempt of it, under its id, with all that was
        logged so far. An id that the user gave stays. given: the user gives this one."""
        if self._progress.last is not None:
            return  # rolled back, or resumed within a process: its steps go on
        if run_id is not None and run_id != self.id and self.settings.run_id is None:
            self._identity.adopt(run_id)
        if given:
            self.settings = replace(self.settings, run_id=run_id)
        if start_step is not None:
            self.start_at(start_step)
        else:
            self._sender.event("state", {"state": "starting"})

    def _goes_on_at(self, step: int) -> None:
        """A trainer resumes from its own checkpoint: its next step has this number. The script's own `start_step`
        wins."""
        if not self.ended and self.start_step in (None, step):  # another rank may have sent the same number
            self.start_at(step)

    def start(self) -> None:
        """Starts the sender and the hooks. Called once, by attach."""
        if self.settings.disabled:
            self._sender.disabled = True
            return
        guard.reset()
        who, self._oom_kills = self._identity, oom_kills_of_host()
        who.ended = lambda: self._ending is not None or self._sender.closing_at is not None
        who.begun = lambda: self._progress.last is not None or who.ended()
        who.placed = self._placed
        self._tell_state(
            "starting", **self._titles(), name=self._name or self._default_name(), start_step=who.start_step,
            **self._place(), **describe(),
        )  # fmt: skip
        self._media.source = self._sender.add_source(self._media.poll)
        self._sampler = sampler = Sampler(
            self._sender,
            step=self._progress.logged_at,
            begun=lambda: self._progress.last is not None,
            thread=self._training_thread,
            device=self._trained.device,
        )
        sampler.install()
        self._investigator.set_sample_period = functools.partial(setattr, sampler, "period_s")
        MemoryTable(self._sender, self._progress, self._trained.model).install()
        UnmeasuredLines(self._sender, self._progress, self._trained.model).install()
        self._compilations.install()
        self._polling.sampler = sampler
        self._polling.install()
        self._sender.on_command.append(self._investigator.obey)
        self._console = Console(self._sender)
        self._console.install()
        self._context.install()
        state.current = self._progress
        patching.when_torch_is_imported(patching.install_for_run)
        self.capture_logs(self.settings.capture_logs)
        self.mirror(self.settings.tensorboard)
        if launched.current is None:
            self.tune_malloc(self.settings.tune_malloc)
        self._sender.start()

    def capture_logs(self, wanted: bool) -> None:
        """Whether what the script logs by other loggers is recorded from here on."""
        self._progress.logs.captures = wanted
        if wanted and state.current is self._progress:
            patching.watch_loggers()

    def change(
        self,
        *,
        tensorboard: str | os.PathLike[str] | None,
        tune_malloc: bool | None,
        capture_logs: bool | None,
        stoppable: bool,
    ) -> None:
        """Settings that a later attach() of the same run gives. Raises ConfigError."""
        given = AgentConfig.from_env(tensorboard=tensorboard, tune_malloc=tune_malloc, capture_logs=capture_logs)
        self.mirror(given.tensorboard)
        if tune_malloc is not None:
            self.tune_malloc(tune_malloc)
        if capture_logs is not None:
            self.capture_logs(given.capture_logs)
        self._investigator.stop.raises = stoppable or self._investigator.stop.raises

    def mirror(self, folder: Path | None) -> None:
        """Writes event files of TensorBoard there as well, unless it does so somewhere already."""
        if folder is None or self._sender.mirror is not None or self._sender.disabled:
            return
        try:
            from perfagent.mirror.tensorboard import TensorBoardMirror

            self._sender.mirror = TensorBoardMirror(folder)
        except Exception as error:  # noqa: BLE001 - a disk that is full; a broken installation of somebody else's package
            said = f"perfagent: nothing is written for TensorBoard into {folder}: {error}; the run itself goes on"
            self._sender.tell("mirror", logging.WARNING, said)

    def tune_malloc(self, wanted: bool) -> None:
        """At the start; under `perfagent run` when the script attaches, which may want none of it, or after the first
        step."""
        self.settings = replace(self.settings, tune_malloc=wanted)
        if not self._sender.disabled:
            self._context.malloc = host_allocator.tune(wanted)

    def _tell_state(self, state: str, **more: object) -> None:
        """Reports a state. Values that are None, not known, are left out."""
        self._sender.event("state", {"state": state} | {key: value for key, value in more.items() if value is not None})

    def _titles(self) -> dict[str, object]:
        return {"config": self.config, "tags": [*self._tags], "group": self.group, "notes": self._notes}

    def _place(self) -> dict[str, object]:
        """Which rank of how many this is, as far as that is known."""
        who = self._identity
        if who.joining is not None:
            return {}
        return {name: getattr(who, name) for name in ("rank", "local_rank", "node_rank", "world_size")}

    def _placed(self) -> None:
        """On the sender's thread: it is known whose rank this is."""
        self._progress.links.rank = self._identity.rank
        ended = self._identity.ended()
        to_be_told = ended and any(event.kind == "state" for event in self._sender.events)
        # an end that was reported before is to remain the last word
        ending = self._ending if ended and not to_be_told else None
        state, reason, more = ending or ("running" if self._progress.last else "starting", "", {})
        name = self._name or self._default_name()
        self._tell_state(state, **more, reason=reason or None, config=self.config, name=name, **self._place())
        if to_be_told:
            self._sender.events.rotate(1)

    def _default_name(self) -> str | None:
        return self._identity.default_name(self.settings.run_id)

    def take_up(
        self,
        model: nn.Module | None,
        optimizer: object,
        config: dict[str, Any],
        tags: list[str],
        *,
        project: str | None = None,
        name: str | None = None,
        group: str | None = None,
        notes: str | None = None,
    ) -> None:
        """Adds the arguments of a later attach() or init() of the run. Raises ConfigError for a project that cannot be one."""
        if project is not None:
            self.settings = replace(self.settings, project=project)
            self._identity.project = project  # before the event: the sender's thread looks here when it has taken one
        if name is not None:
            self._identity.name = name
        self._name, self.group, self._notes = name or self._name, group or self.group, notes or self._notes
        self.config.update(config)
        self._tags.extend(tag for tag in tags if tag not in self._tags)
        begins = self._trained.is_next(model)
        if config or tags or project or name or group or notes or begins:
            after = self._progress.completed if begins else None
            state = "running" if self._progress.last else "starting"
            self._tell_state(state, **self._titles(), name=self._name, training_after=after)
        self._trained.name(model, optimizer)

    @guard.guarded
    def _first_step(self, optimizer: Optimizer) -> None:
        version = str(sys.modules["torch"].__version__)
        self._sender.event("state", {"state": "running", "torch": version}, step=self._progress.completed)
        self._trained.note_device(optimizer)
        patching.install_late()
        self._progress.selection.find_first_model(optimizer)
        self._trained.watch()
        if self._context.malloc is None:
            self.tune_malloc(self.settings.tune_malloc)
        self._context.first_step()

    def trains_another(self, model: nn.Module | None) -> bool:
        """Whether this run has trained, and not that model (or one that is part of it, or that it is part of)."""
        return self._trained.is_another(model)

    def warn_of_next_training(self, model: nn.Module | None) -> None:
        """Where attach() was given the model of another training, and no name: both are one run."""
        if self._trained.is_another(model):
            self._messages.warn("another model", run=self.called, step=self._progress.logged_at())

    def _training_thread(self) -> tuple[int | None, int]:
        from perfagent.samplers.training_thread import native_id

        p = self._progress
        return (None if p.last is None else native_id(int(p.thread))), p.completed

    # ---- ending

    def newest_step(self) -> int:
        """The newest step that was made or logged; it grows while the training goes on."""
        return max(self._progress.done_at(), self._given_step)

    def at_exit(self, status: object, because: Cause | None = None) -> None:
        """The process ends by itself. status: the argument of sys.exit. because: the exception that was being handled
        then. (As `_at_exit` in process_end.py.)"""
        if self._ending is not None and not self.inherited:
            self._close(*self._ending)  # Ctrl-C may have come into the end
        if self.ended or self.inherited or self._sender.disabled:
            return
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        # at a prompt the next line mends it
        if error is not None and error is not self._last_value and not hasattr(sys, "ps1"):
            self.fail(error)
        elif status in (None, 0, False):
            self._end("finished")
        else:
            code = int(status) if isinstance(status, int) else 1
            said = "" if isinstance(status, int) else str(status)[:500]
            if because is None:
                self._end(*of_exit_code(code, said))
            else:
                ending, why, exception, trace = because
                reason: Facts = {"key": "left_after", "why": why, "code": code, "said": said}
                self._end(ending, reason, exception=exception, traceback=trace)

    def left_from(self, frame: FrameType, error: BaseException | None) -> Cause | None:
        """A function calls sys.exit with a status that tells of failure, where it handles this."""
        if self.ended or self.inherited or self._sender.disabled:
            return None
        if error is not None and self._investigator.is_past(error):
            error = None
        if error is not None:
            self._investigator.ended_by(error)
        self._investigator.left_from(frame)
        return None if error is None else cause(error)

    def thread_ended(self, thread: Thread, error: BaseException) -> None:
        """Reports that an exception ended a thread of the script. Called on that thread, by threading.excepthook."""
        if self.ended or self.inherited or self._threads_told >= MOST_THREADS_TOLD:
            return
        self._threads_told += 1
        p = self._progress
        data: dict[str, object] = {"name": text_of(thread.name, 200), "reason": cause(error)[1]}
        data |= {"training": p.last is not None and p.thread == thread.ident}
        self._sender.event("thread", data | {"frames": frames_of(error.__traceback__)}, step=p.completed)

    def fail(self, error: BaseException) -> None:
        """Ends the run by what ended the process."""
        if self.ended or self.inherited or self._sender.disabled:
            return
        self._investigator.ended_by(error)
        ending, reason, exception, trace = cause(error)
        unused = unused_parameters(error)
        more: dict[str, object] = {"unused": unused} if unused else {}
        kills = oom_kills_of_host() if "killed by signal" in reason else None
        if kills is not None and self._oom_kills is not None:
            more["oom_kills"] = max(0, kills - self._oom_kills)
        self._end(ending, reason, exception=exception, traceback=trace, **more)

    def _end(self, ending: str, reason: str | Facts = "", **more: object) -> None:
        if self.ended or self.inherited:
            return
        self.ended = True
        stop = self._investigator.stop
        if ending == "finished" and stop.due:
            reason = {"key": "stopped", "step": self._progress.completed, "why": stop.why}
        self._ending = ending, reason, more
        p = self._progress
        p.links.ended = True
        if p.awaits_optimizer():
            p.settle_unstepped(by_log=True)
        p.settle_early(None)
        if p.contents is not None:
            p.contents.report()
        self._tell_unseen()
        self._compilations.poll()
        p.contents = None
        after_last_step(p)
        self._investigator.close()
        self._polling.close()
        current = state.current is p
        if current:
            state.current = None
        self._trained.take_off()  # first: what it patched may lie on top of a patch of a framework's
        if current:
            patching.remove()
        if self._console is not None:
            self._console.close()
        self._context.close()
        self._close(ending, reason, more)

    def _tell_unseen(self) -> None:
        """Under `perfagent run`: the script has started its training in other processes, which are not recorded."""
        unseen = launched.current is not None and launched.current.watched and self._progress.last is None
        group = self._identity.group
        if unseen and self._progress.logs.early_step == 0 and not (group is not None and group.exists()):
            number = count_started()
            if number:
                self._sender.event("alert", {"level": "info", "unrecorded": number})

    def _close(self, ending: str, reason: str | Facts, more: dict[str, object]) -> None:
        self._sender.close(ending, reason, EXIT_S, **more)
        self._context.ended()
        if self._sampler is not None:
            self._sampler.resign()
        self._ending = None
