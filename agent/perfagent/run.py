"""One training job as this process sees it: what a script calls, what is watched from the start to the end.

Nothing here waits for a server, installs a signal handler or imports torch. What a training script calls in its loop is
`Run.log`: one append.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from perfagent import host_allocator, patching, verdict
from perfagent import launch_options as launched
from perfagent.agent_config import AgentConfig
from perfagent.arguments import as_tags, flat
from perfagent.boundary import guard
from perfagent.context.collector import Context
from perfagent.context.console import Console
from perfagent.context.process import describe
from perfagent.decode.evaluation_spans import Evaluations
from perfagent.decode.step_decoder import StepReader, interned
from perfagent.delivery.handoff import Sender, Source
from perfagent.delivery.user_messages import Messages
from perfagent.device import cuda_device_of, snapshot
from perfagent.drop_in import of_run, say_unknown
from perfagent.end_reason import cause, of_exit_code, unused_parameters
from perfagent.errors import ConfigError
from perfagent.exit_status import Cause
from perfagent.governor import Governor
from perfagent.hooks.dataloader import timed
from perfagent.hooks.evaluation import after_last_step
from perfagent.hooks.model_discovery import has_optimizer
from perfagent.hooks.model_hooks import Watching
from perfagent.hooks.multi_optimizer import Together
from perfagent.hooks.optimizer_step import make_primary
from perfagent.hooks.phases import Span
from perfagent.identity import Identity
from perfagent.media.outbox import Outbox
from perfagent.naming import default_name
from perfagent.probes.compilations import Compilations
from perfagent.probes.memory_table import MemoryTable
from perfagent.probes.unmeasured_lines import UnmeasuredLines
from perfagent.rootcause.investigator import Investigator
from perfagent.rootcause.stacks import frames_of
from perfagent.run_config import RunConfig, Tags
from perfagent.run_repr import Shown
from perfagent.samplers.cgroup import oom_kills_of_host
from perfagent.samplers.child_processes import started_here, unrecorded
from perfagent.samplers.sampler import Sampler
from perfagent.signals.gradient_schedule import Health
from perfagent.signals.memory import device_in_use
from perfagent.step.pending_logs import EarlyLog, LoggedLater
from perfagent.step.state import Progress, state

if TYPE_CHECKING:
    from perfagent.media import Media
    from perfagent.probes.scheduler import Looks
    from perfagent.wire import Finding

__all__ = ["Run"]

Item = TypeVar("Item")

EXIT_S = 1.5
"""What the end of a process may take for delivery; with the rest of the exit it stays below 2 s."""
LEVELS = {"info": "info", "warning": "warning", "warn": "warning", "critical": "critical", "error": "critical"}
END_STATES = ("finished", "failed", "oom", "killed", "preempted")
MOST_THREADS_TOLD = 8
MAX_STEP = 2**53
"""What every reader of a step can hold, and the server takes."""
PUBLIC = (
    "alert", "batches", "config", "ended", "finish", "group", "id", "log", "name", "notes", "phase", "project",
    "should_stop", "start_step", "steps_done", "tags", "url", "verdict",
)  # fmt: skip
"""What a prompt offers."""
_PLAIN = frozenset((float, int, bool))
_OVERHEAD = ("agent/overhead_pct",)
_POLL_S = 0.5
"""One pace for all that is asked now and then: they are asked in the same tick, and most ticks ask nobody."""
_BATCHES_S = 2.0
_monotonic = time.monotonic
_NO_START = launched.Start()


class Run:
    """One training job as this process sees it. Made by `attach` or `init`; methods do nothing in a forked child.

    config: what the user passed as configuration: a dict whose entries are attributes as well.
    """

    settings: AgentConfig
    _identity: Identity

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
        """start: what `perfagent run` drew."""
        self.settings, self.config = settings, RunConfig(config)
        self._name, self._tags, self.group, self._notes = name, tags, group, notes
        self._pid = os.getpid()
        self._ended = False
        identity = (
            sender.identity
            if sender
            else Identity.from_environment(settings, name=name, start_step=start_step, start=start)
        )
        self._identity = identity
        self._sender = sender or Sender(settings, identity)
        self._rows = self._sender.rows
        self._governor = Governor(settings.overhead_budget_pct)
        begin = start_step if start_step is not None else identity.start_step or 0
        # `start_step` is the number of the first step to come: what an older attempt has from there on is cut from view
        done = max(0, begin - 1)
        self._progress = Progress(
            self._rows, self._governor, reader=StepReader(), health=Health(), together=Together(), start_step=done
        )
        self._progress.on_first_step = self._first_step
        self._progress.on_next_model = self._next_model
        self._progress.on_event = self._sender.event
        self._progress.on_resumed = self._goes_on_at
        self._progress.account.evaluations = Evaluations()
        self._progress.health.rank = identity.rank
        self._model: weakref.ref[Any] | None = None
        self._cuda_device: int | None = None
        self._likely_device: int | None = None
        self._looks: Looks | None = None
        self._look_source: Source | None = None
        self._investigator = self._progress.investigator = Investigator(self._progress, self._sender, self._known_model)
        self._progress.reader.investigator = self._investigator
        self._progress.health.on_nonfinite = self._investigator.gradients_bad
        self._sender.reader, self._sender.progress = self._progress.reader, self._progress
        self._progress.off = self._sender.disabled
        self._watching = Watching(self._progress, self._investigator.add)
        self._progress.on_next_optimizer = self._watching.watch_step
        self._messages = Messages(self._sender)
        self._media = Outbox(self._sender)
        self._batches_due = 0.0
        self._given_step = -1
        self._given: tuple[Any, ...] = ()
        """Step and names of the last log() that named its step."""
        self._ending: tuple[str, str, dict[str, Any]] | None = None
        """How the run ends, from the moment on that its end has begun."""
        self._last_value = getattr(sys, "last_value", None)
        self._compilations = Compilations(self._sender, self._progress)
        self._threads_told = 0
        self._oom_kills: int | None = None
        self._console: Console | None = None
        self._sampler: Sampler | None = None
        self._context = Context(self._sender, self.config, self._known_model, self._known_optimizer)

    # ---- copies of what holds it: a trainer, a module, a dataset

    def __copy__(self) -> Run:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Run:
        """There is one run, however many copies a script makes of what it keeps it in (averages of weights,
        Lightning's)."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self._identity.source,)

    def __dir__(self) -> list[str]:
        return sorted(PUBLIC)

    def __getattr__(self, name: str) -> Any:
        said = ""
        if not name.startswith("_"):
            from perfagent.wrong_calls import instead_of

            with contextlib.suppress(KeyError):
                return of_run(self, name)
            said = f"; {instead_of(name, PUBLIC)}"
        raise AttributeError(f"'Run' object has no attribute {name!r}{said}", name=name, obj=self)

    # ---- what a training script calls

    @property
    def project(self) -> str:
        return self.settings.project

    @property
    def name(self) -> str | None:
        """Scripts may set it, as they may set notes and tags, which only grow."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._retitle(name=str(name)[:256])

    @property
    def notes(self) -> str | None:
        return self._notes

    @notes.setter
    def notes(self, notes: str) -> None:
        self._retitle(notes=str(notes)[:100_000])

    @property
    def tags(self) -> list[str]:
        return Tags(self._tags)

    @tags.setter
    def tags(self, tags: Iterable[str]) -> None:
        self._retitle(as_tags(tags))

    def _retitle(self, tags: Iterable[str] = (), **texts: str) -> None:
        if not self._ended:
            self.take_up(None, None, {}, [*tags], **texts)

    @property
    def id(self) -> str | None:
        """The run's id; None on a rank that has not yet learned it from rank 0."""
        return self._identity.run

    @property
    def url(self) -> str | None:
        """The run's page on the server; None where it sends nothing there."""
        sends = self.settings.record is None and not self.settings.disabled
        return f"{self._sender.config.server}/run/{self.id}" if self.id and sends else None

    def log(
        self,
        metrics: Mapping[str, Any] | None = None,
        step: int | None = None,
        commit: bool | None = None,
        **foreign: Any,
    ) -> None:
        """Records numbers under names, and images, audio, tables and histograms (`perfagent.Image` ...), one or a list.
        Without a step they belong to the step in progress. A dict among the values is a group: `{"val": {"loss": x}}` is
        `val.loss`.

        A value on a GPU is not waited for; what is none of these is left out and counted. commit: False where the next call
        is of the same step, in a process that never steps an optimizer, where else each call is a step of its own.
        foreign: arguments of other trackers, which are left out.
        """
        p = self._progress
        if foreign:
            metrics = foreign.pop("data", metrics)  # as W&B calls them
            say_unknown("log", foreign)
        if p.off:
            self._is_over("log")
            return
        try:
            values = dict(metrics)  # type: ignore[arg-type]
        except Exception as error:
            if guard.by_signal(error):
                raise
            self._messages.no_metrics(metrics)
            return
        later = False
        media: dict[str, list[Media]] = {}
        for value in values.values():  # with cold caches half of what `issuperset(map(type, ...))` takes
            if type(value) is not float and type(value) not in _PLAIN:
                values = flat(values)
                media = self._media.take_out(values)
                later = True
                snapshot(values)
                break
        if step is not None:
            if type(step) is not int:
                try:
                    step = operator.index(step)
                except TypeError:
                    self._messages.no_step(step)
                    return
            if not 0 <= step <= MAX_STEP:  # the server takes no other; the next step would be one more
                self._messages.no_step(step)
                return
            if step < self._given_step and any(name in values for name in self._given):
                self._messages.warn("step back", step=step, newest=self._given_step)
            self._given_step, self._given = step, (*values,)
            p.early_step = max(p.early_step, step + 1)
            if "loss" in values:
                self._explicit_loss(step, values["loss"])
        elif p.seen_backward:
            if p.last is None and p.unstepped():
                self._log_unstepped(values, media, commit)
                return
            step = p.completed + p.opened
            loss = values.get("loss")
            if type(loss) is float:
                p.user_losses[step] = loss
            elif "loss" in values:
                self._explicit_loss(step, loss)
        else:
            early = EarlyLog(time.time(), time.monotonic(), values, commit)
            self._media.add(media, early)
            p.log_early(early)
            return
        if media:
            self._media.add(media, step)
        if not later:
            p.rows.append((step, 0.0, _monotonic(), values))
        elif values:
            p.rows.append(LoggedLater(step, time.time(), time.monotonic(), values))

    def alert(self, title: str, text: str = "", level: str = "warning", **foreign: Any) -> None:
        """Raises an alert by hand. level: info, warning or critical (WARN and ERROR are accepted). foreign: as of log()."""
        say_unknown("alert", foreign)
        if self._sender.disabled:
            self._is_over("alert")
            return
        given = getattr(level, "value", level)  # wandb's levels are members of an enum
        severity = LEVELS.get(given.lower()) if isinstance(given, str) else None
        if severity is None:  # a slip
            said = (
                f"perfagent: alert() takes the level info, warning or critical, not {level!r:.80}; it is a warning now"
            )
            self._sender.tell("level", logging.WARNING, said)
            severity = "warning"
        self._sender.event(
            "alert",
            {"title": _text(title, 200), "text": _text(text, 4000), "level": severity},
            step=self._progress.logged_at(),
        )

    def phase(self, name: str) -> Span:
        """Times a part of the loop: `with run.phase("checkpoint"): ...`. Its time is `phase/NAME_s`, not `other`."""
        if not isinstance(name, str) or not name or len(name) > 64:
            raise ConfigError(
                f"a phase needs a name of 1 to 64 characters such as 'checkpoint' or 'eval', not {name!r:.80}"
            )
        return Span(self._progress, name if name.isidentifier() else self._messages.phase_name(name))

    def batches(self, iterable: Iterable[Item]) -> Iterator[Item]:
        """The same items, with the wait for each recorded as data wait. For loops without a DataLoader."""
        return timed(self._progress, iterable)

    def verdict(self) -> Finding | None:
        """What the server says about this run, also after its end; what was measured so far is sent before, in at most
        1 s. None where nothing goes to a server (a recording, a forked child, PERFAGENT_DISABLED) and, with a warning,
        when the server does not answer within 2 s, does not know the run yet, or the key may not read."""
        if self.settings.disabled or self.inherited or self.settings.record is not None or not self.id:
            return None
        self._sender.flush(1.0)
        return verdict.ask(self.id, self._sender.config, self._sender.tell)

    def finish(self, status: str | int | None = None, *, exit_code: int | None = None, **_foreign: Any) -> None:
        """Ends the run and delivers what is left, in at most 1.5 s. status: finished (default), failed, ..., or an exit
        code. exit_code: the same, under the name that other trackers have for it; what else these take (`quiet`) says
        nothing of the run."""
        status, reason = exit_code if status is None else status, ""
        if isinstance(status, int):
            ending, reason = of_exit_code(int(status))
        else:
            ending = "finished" if status is None else status
        if ending not in END_STATES:
            raise ConfigError(f"status must be one of {', '.join(END_STATES)} or an exit code, not {status!r:.80}")
        self._end(ending, reason)

    def give_way(self, to: AgentConfig) -> None:
        """Ends, since the process goes on with another run, of these settings."""
        self._sender.followed = to.sources
        self.finish()

    def __repr__(self) -> str:
        return self._shown().text()

    def _repr_html_(self) -> str:
        """What a notebook shows of it: with the server's verdict and the curve of the loss, where it has them."""
        if self.settings.disabled or self.inherited or self.settings.record is not None or not self.id:
            return self._shown().html()
        return self._shown().html(*verdict.with_losses(self.id, self._sender.config))

    def show(self, every_s: float = 2.0) -> None:
        """Shows the run in a notebook, and keeps that output up to date every `every_s` seconds until the run has ended, while
        cells below it train. Elsewhere it is printed once."""
        from perfagent.notebook import show_live  # not with the training: a notebook asks for it

        show_live(self, lambda: self._ended, every_s)

    def _shown(self) -> Shown:
        name = self.name or self._default_name() or self.id or ""
        place = self.url or (f"recorded in {self.settings.record}" if self.settings.record is not None else None)
        if self.settings.disabled:
            return Shown(name, "disabled", None, None, None)
        running = "running" if self._progress.last is not None or self._has_logged() else "starting"
        how = (
            "forked child"
            if self.inherited
            else self._sender.final or ("given up" if self._sender.disabled else running)
        )
        return Shown(name, how, self._progress.done_at() or None, self._sender.newest_loss, place)

    def _has_logged(self) -> bool:
        """Whether log() was called, drained or not: its calls leave these traces."""
        p = self._progress
        by_calls = self._given_step >= 0 or p.first_logged >= 0 or p.early_step > (self.start_step or 0)
        return by_calls or bool(p.early) or self._sender.logged[0] > 0

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.finish()
        else:
            self.fail(error)

    @property
    def called(self) -> str:
        """Its name and id, for a sentence."""
        name = self.name or self._default_name()
        words = [*([repr(name)] if name else []), *([f"({self.id})"] if self.id else [])]
        return " ".join(words) or "of this rank"

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def steps_done(self) -> int:
        return self._progress.completed

    @property
    def should_stop(self) -> bool:
        """Whether the run was stopped from afar, and this was its last step: for loops that end by themselves. Read it
        after each step; all ranks get the same answer after the same step. Only a loop that reads it, or a script that
        said attach(stoppable=True), may be stopped."""
        return self._investigator.stop.read()

    def allow_stop(self) -> None:
        """As attach(stoppable=True)."""
        self._investigator.stop.raises = True

    @property
    def start_step(self) -> int | None:
        """The number of its first step, where that was told: by the script, a checkpoint, or rank 0."""
        return self._identity.start_step

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child of the process that made it: the run is silent here."""
        return self._pid != os.getpid()

    # ---- starting

    def start_at(self, start_step: int) -> None:
        """The first step to come has that number: told by a training that was resumed before it made one."""
        p = self._progress
        p.completed = p.measure_at = max(0, start_step - 1)
        p.early_step = max(p.early_step, start_step)
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
        if not self._ended and self.start_step in (None, step):  # another rank may have sent the same number
            self.start_at(step)

    def start(self) -> None:
        """Starts the sender and the hooks. Called once, by attach."""
        if self.settings.disabled:
            self._sender.disabled = True
            return
        guard.reset()
        who, self._oom_kills = self._identity, oom_kills_of_host()
        told = {
            "state": "starting",
            "name": self.name or self._default_name(),
            "config": self.config,
            "tags": self.tags,
            "group": self.group,
            "notes": self.notes,
            "start_step": who.start_step,
            **self._place(),
            **describe(),
        }
        who.ended = lambda: self._ending is not None or self._sender.closing_at is not None
        who.begun = lambda: self._progress.last is not None or who.ended()
        who.placed = self._placed
        self._sender.event("state", {key: value for key, value in told.items() if value is not None})
        self._sender.add_source(self._poll, every_s=_POLL_S)
        self._media.source = self._sender.add_source(self._media.poll)
        self._sampler = sampler = Sampler(
            self._sender,
            step=self._progress.logged_at,
            begun=lambda: self._progress.last is not None,
            thread=self._training_thread,
            device=self._own_device,
        )
        sampler.install()
        self._investigator.set_sample_period = functools.partial(setattr, sampler, "period_s")
        MemoryTable(self._sender, self._progress, self._known_model, self._own_device).install()
        UnmeasuredLines(self._sender, self._progress, self._known_model).install()
        self._compilations.install()
        self._sender.imports.append("perfagent.probes.scheduler")
        self._look_source = self._sender.add_source(self._look, every_s=_POLL_S)
        self._sender.add_source(self._investigator.poll, every_s=_POLL_S)
        self._sender.on_command.append(self._investigator.obey)
        self._console = Console(self._sender)
        self._console.install()
        self._context.install()
        state.current = self._progress
        patching.when_torch_is_imported(_torch_came)
        self.capture_logs(self.settings.capture_logs)
        self.mirror(self.settings.tensorboard)
        if launched.current is None:
            self.tune_malloc(self.settings.tune_malloc)
        self._sender.start()

    def capture_logs(self, wanted: bool) -> None:
        """Whether what the script logs by other loggers is recorded from here on."""
        self._progress.captures = wanted
        if wanted and state.current is self._progress:
            patching.watch_loggers()

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

    def _place(self) -> dict[str, Any]:
        """Which rank of how many this is, as far as that is known."""
        who = self._identity
        if who.joining is not None:
            return {}
        return {name: getattr(who, name) for name in ("rank", "local_rank", "node_rank", "world_size")}

    def _placed(self) -> None:
        """On the sender's thread: it is known whose rank this is."""
        self._progress.health.rank = self._identity.rank
        ended = self._identity.ended()
        to_be_told = ended and any(event.kind == "state" for event in self._sender.events)
        state, reason = "running" if self._progress.last else "starting", ""
        more: dict[str, Any] = {}
        if ended and not to_be_told and self._ending is not None:
            state, reason, more = self._ending  # it was told before, and is to remain the last word
        told = {"state": state, "reason": reason or None, **more, "config": self.config, **self._place()}
        told["name"] = self.name or self._default_name()
        self._sender.event("state", {key: value for key, value in told.items() if value is not None})
        if to_be_told:
            self._sender.events.rotate(1)

    def _default_name(self) -> str | None:
        """Of a run whose id was drawn: one that the user or a scheduler named keeps its name. Rank 0 tells it."""
        run, drawn = self._identity.run, self.settings.run_id is None
        if self._identity.rank != 0 or self._identity.joining is not None or run is None or not drawn or "-" in run:
            return None
        return default_name(run)

    def take_up(
        self,
        model: Any,
        optimizer: Any,
        config: dict[str, Any],
        tags: list[str],
        *,
        project: str | None = None,
        name: str | None = None,
        group: str | None = None,
        notes: str | None = None,
    ) -> None:
        """What a later attach() or init() of the same run adds. Raises ConfigError for a project that cannot be one."""
        if project is not None:
            self.settings = replace(self.settings, project=project)
            self._identity.project = project  # before the event: the sender's thread looks here when it has taken one
        if name is not None:
            self._identity.name = name
        self._name, self.group, self._notes = name or self._name, group or self.group, notes or self._notes
        self.config.update(config)
        self._tags.extend(tag for tag in tags if tag not in self._tags)
        known = None if self._model is None else self._model()
        begins = self._progress.last is not None and model is not None and model is not known
        if config or tags or project or name or group or notes or begins:
            told: dict[str, Any] = {
                "name": self.name,
                "config": self.config,
                "tags": [*self._tags],
                "group": self.group,
                "notes": self.notes,
            }
            told["state"] = "running" if self._progress.last else "starting"
            if begins:
                told["training_after"] = self._progress.completed
            self._sender.event("state", {key: value for key, value in told.items() if value is not None})
        if model is not None:
            self._model = self._progress.found = weakref.ref(model)
            self._progress.model_size = _trainable(model)
            if self._progress.last is not None:
                self._watch_again()
        if optimizer is not None:
            inner = getattr(optimizer, "optimizer", None)  # Accelerate's wrapper
            trained_by = inner if hasattr(inner, "param_groups") else optimizer
            make_primary(self._progress, trained_by)
            self._watching.named(trained_by)

    def _first_step(self, optimizer: Any) -> None:
        torch = sys.modules["torch"]
        self._sender.event(
            "state", {"state": "running", "torch": str(torch.__version__)}, step=self._progress.completed
        )
        if torch.cuda.is_initialized():
            self._cuda_device = device = cuda_device_of(optimizer, torch.cuda.current_device())
            self._progress.stream = torch.cuda.current_stream(device).cuda_stream
        patching.install_late()
        self._watch_model()
        if self._context.malloc is None:
            self.tune_malloc(self.settings.tune_malloc)
        self._context.first_step()

    def _own_device(self) -> int | None:
        """This rank's CUDA device: that of the parameters it trains; before its first step, and where it never steps an
        optimizer, that on which it has most memory. On the sender's thread and the courier's."""
        if self._cuda_device is not None:
            return self._cuda_device
        if self._likely_device is None:
            self._likely_device = device_in_use()
        return self._likely_device

    def _known_model(self) -> Any:
        found = self._model or self._progress.found
        return found() if found is not None else None

    def _known_optimizer(self) -> Any:
        return self._progress.primary() if self._progress.primary is not None else None

    def trains_another(self, model: Any) -> bool:
        """Whether this run has trained, and not that model (or one that is part of it, or that it is part of)."""
        if model is None or self._progress.last is None or (self._model is None and self._progress.found is None):
            return False
        known = self._known_model()  # None: it is gone
        return known is None or not (_holds(known, model) or _holds(model, known))

    def tell_of_next_training(self, model: Any) -> None:
        """Where attach() was given the model of another training, and no name: both are one run."""
        if self.trains_another(model):
            self._messages.warn("another model", run=self.called, step=self._progress.logged_at())

    def _watch_model(self) -> None:
        self._watching.put_on(self._known_model(), self._known_optimizer())

    def _next_model(self, goes_on: bool) -> None:
        """The process trains another model, which the hooks have found. goes_on: as the same training, resumed."""
        self._model = None
        if not goes_on:
            self._sender.event("state", {"state": "running", "training_after": self._progress.began})
        self._watch_again()

    def _watch_again(self) -> None:
        self._watching.take_off()
        self._watch_model()

    # ---- on the sender's thread

    def _poll(self) -> None:
        p = self._progress
        if self._identity.joining is not None or not self._identity.known:
            self._identity.poll()
        group = self._identity.group
        if group is not None and p.last is None and self._sampler is not None and group.exists():
            self._sampler.stop()
        if p.early and p.early[0].waits_too_long():
            self._settle_waiting()
        self._watching.poll()
        self._tell_batches()
        own_ns = p.spent_ns(self._sender.logged, self._sender.stepped)
        share = self._governor.report(own_ns, p.pass_ns + p.telling_ns + p.device_ns, self._sender.cpu_s, p.completed)
        if share is None:
            return
        p.health.come_back(p)
        self._rows.append((p.logged_at(), time.time(), time.monotonic(), _OVERHEAD, (share,)))

    def _training_thread(self) -> tuple[int | None, int]:
        from perfagent.samplers.training_thread import native_id

        p = self._progress
        return (None if p.last is None else native_id(int(p.thread))), p.completed

    @guard.guarded
    def _tell_batches(self, *, at_end: bool = False) -> None:
        """What was seen in the batches since the last time."""
        contents, at = self._progress.contents, _monotonic()
        if contents is None or (at < self._batches_due and not at_end):
            return
        self._batches_due = at + _BATCHES_S
        values = contents.report()
        if values:
            names = interned(tuple(values))
            self._rows.append((self._progress.logged_at(), time.time(), at, names, tuple(values.values())))

    def _settle_waiting(self) -> None:
        """Gives logs that waited for a first step the one that is theirs without it."""
        p = self._progress
        if p.awaits_optimizer():
            p.settle_unstepped(by_log=not has_optimizer())
        else:
            p.settle_early(None)

    def _look(self) -> None:
        """Rare looks at a step, from the first step on."""
        if self._looks is None:
            if self._progress.last is None:
                return
            from perfagent.probes.scheduler import Looks

            self._looks = Looks(self._investigator, self._sender, self._known_model, self._own_device)
        idle_until = self._looks.poll()
        if self._look_source is not None:
            self._look_source.due = max(self._look_source.due, idle_until)

    # ---- details

    def _log_unstepped(self, values: dict[str, Any], media: dict[str, list[Media]], commit: bool | None) -> None:
        p = self._progress
        if "loss" in values and not p.by_log:
            self._explicit_loss(p.completed + 1, values["loss"])
        early = EarlyLog(time.time(), time.monotonic(), values, commit)
        self._media.add(media, early)
        p.log_unstepped(early)

    def _explicit_loss(self, step: int, value: Any) -> None:
        """The user's own loss stands for its step; a number that is still on its way cannot be compared with ours."""
        p = self._progress
        number = (
            value
            if type(value) is float
            else float(value)
            if type(value) is int and abs(value) < 1e300
            else float("nan")
        )
        if step == p.completed + 1 or (p.last is not None and p.last.step == step):
            p.user_losses[step] = number
        else:
            p.reader.loss_by_user = True  # steps counted in another way: two counts in one series would be nonsense

    def _is_over(self, call: str) -> None:
        """A call that comes too late is left out, and that is said once."""
        if self._ended and not self.inherited and not self.settings.disabled:
            self._messages.warn("late", call, call=call, run=self.called)

    def at_exit(self, status: Any, because: Cause | None = None) -> None:
        """The process ends by itself. status: what sys.exit was told. because: the exception that was being handled
        then. (As `_at_exit` in session.py.)"""
        if self._ending is not None and not self.inherited:
            self._close(*self._ending)  # Ctrl-C may have come into the end
        if self._ended or self.inherited or self._sender.disabled:
            return
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        # at a prompt the next line mends it
        if error is not None and error is not self._last_value and not hasattr(sys, "ps1"):
            self.fail(error)
        elif status in (None, 0, False):
            self._end("finished")
        else:
            code = int(status) if isinstance(status, int) else 1
            said = "" if isinstance(status, int) else f": {str(status)[:500]}"
            if because is None:
                self._end(*of_exit_code(code, said))
            else:
                ending, reason, exception, trace = because
                self._end(ending, f"{reason} (exit code {code}{said})", exception=exception, traceback=trace)

    def left_from(self, frame: FrameType, error: BaseException | None) -> Cause | None:
        """A function calls sys.exit with a status that tells of failure, where it handles this."""
        if self._ended or self.inherited or self._sender.disabled:
            return None
        if error is not None and self._investigator.is_past(error):
            error = None
        if error is not None:
            self._investigator.ended_by(error)
        self._investigator.left_from(frame)
        return None if error is None else cause(error)

    def thread_ended(self, thread: Thread, error: BaseException) -> None:
        """Reports that an exception ended a thread of the script. Called on that thread, by threading.excepthook."""
        if self._ended or self.inherited or self._threads_told >= MOST_THREADS_TOLD:
            return
        self._threads_told += 1
        p = self._progress
        told: dict[str, Any] = {"name": _text(thread.name, 200), "reason": cause(error)[1]}
        told |= {"training": p.last is not None and p.thread == thread.ident}
        self._sender.event("thread", told | {"frames": frames_of(error.__traceback__)}, step=p.completed)

    def fail(self, error: BaseException) -> None:
        """Ends the run by what ended the process."""
        if self._ended or self.inherited or self._sender.disabled:
            return
        self._investigator.ended_by(error)
        ending, reason, exception, trace = cause(error)
        unused = unused_parameters(error)
        more: dict[str, Any] = {"unused": unused} if unused else {}
        kills = oom_kills_of_host() if "killed by signal" in reason else None
        if kills is not None and self._oom_kills is not None:
            more["oom_kills"] = max(0, kills - self._oom_kills)
        self._end(ending, reason, exception=exception, traceback=trace, **more)

    def _end(self, ending: str, reason: str = "", **more: Any) -> None:
        if self._ended or self.inherited:
            return
        self._ended = True
        stop = self._investigator.stop
        if ending == "finished" and stop.due:
            reason = f"stopped after step {self._progress.completed:,}: {stop.why}"
        self._ending = ending, reason, more
        p = self._progress
        p.ended = True
        if p.awaits_optimizer():
            p.settle_unstepped(by_log=True)
        p.settle_early(None)
        self._tell_batches(at_end=True)
        self._tell_unseen()
        self._compilations.poll()
        p.contents = None
        after_last_step(p)
        self._investigator.close()
        if self._looks is not None:
            self._looks.close()
        current = state.current is p
        if current:
            state.current = None
        self._watching.close()  # first: what it patched may lie on top of a patch of a framework's
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
        if unseen and self._progress.early_step == 0 and not (group is not None and group.exists()):
            number = started_here()
            if number:
                self._sender.event("alert", unrecorded(number))

    def _close(self, ending: str, reason: str, more: dict[str, Any]) -> None:
        self._sender.close(ending, reason, EXIT_S, **more)
        self._context.ended()
        if self._sampler is not None:
            self._sampler.resign()
        self._ending = None


def _text(value: Any, most: int) -> str:
    try:
        return str(value)[:most]
    except Exception:  # noqa: BLE001 - somebody else's __str__, or a whole number of more than 4300 digits
        return f"[{type(value).__name__}]"


def _holds(model: Any, part: Any) -> bool:
    return any(module is part for module in model.modules())


def _trainable(model: Any) -> int:
    """Trainable numbers of a model; those of lazy modules are not known before their first call."""
    is_lazy = sys.modules["torch"].nn.parameter.is_lazy
    return sum(p.numel() for p in model.parameters() if p.requires_grad and not is_lazy(p))


def _torch_came() -> None:
    if state.current is not None:
        patching.install()


def _unpickled(source: str) -> Run:
    """The run that was pickled, in its own process; one that records nothing in a spawned worker or a later process."""
    from perfagent import session  # it imports this module

    run = session.current()
    return run if run is not None and run._identity.source == source else session.silent({}, [])
