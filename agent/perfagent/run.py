"""One training job as this process sees it: what a script calls, what is watched from the start to the end.

Nothing here waits for a server, installs a signal handler or imports torch. What a training script calls in its loop is
`Run.log`: one append.
"""

from __future__ import annotations

import importlib
import logging
import math
import operator
import time
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from perfagent.agent_config import AgentConfig
from perfagent.boundary import guard
from perfagent.calls import verdict
from perfagent.calls.arguments import as_tags, flat
from perfagent.calls.other_trackers import add_names_of_others, say_unknown
from perfagent.calls.run_config import Tags
from perfagent.calls.shown import Shown, show_live
from perfagent.device import read_all_later
from perfagent.errors import ConfigError
from perfagent.hooks.dataloader import timed
from perfagent.hooks.phases import Span
from perfagent.lifecycle import Lifecycle
from perfagent.process.exit_reason import of_exit_code, text_of
from perfagent.step.pending_logs import EarlyLog, LoggedLater

if TYPE_CHECKING:
    from perfagent.media import Media
    from perfagent.wire import Finding

__all__ = ["Run"]

Item = TypeVar("Item")

LEVELS = {"info": "info", "warning": "warning", "warn": "warning", "critical": "critical", "error": "critical"}
END_STATES = ("finished", "failed", "oom", "killed", "preempted")
MAX_STEP = 2**53
"""What every reader of a step can hold, and the server takes."""
PUBLIC = (
    "alert", "batches", "config", "ended", "finish", "group", "id", "log", "name", "notes", "phase", "project",
    "should_stop", "start_step", "steps_done", "tags", "url", "verdict",
)  # fmt: skip
"""Names that a prompt completes."""
_PLAIN = frozenset((float, int, bool))
_monotonic = time.monotonic


class Run(Lifecycle):
    """One training job, as this process sees it. `attach` and `init` return it; `perfagent.run` is the current one.

    As a context manager it ends with the block: `with perfagent.init() as run:`. In a forked child its methods do
    nothing.

    Attributes:
        id: The run's id; None on a rank that has not yet received it from rank 0.
        group: The name of the group, or None.
        ended: Whether the run has ended in this process.
        start_step: The number that `attach` was given, or None.
    """

    # ---- copies of what holds it: a trainer, a module, a dataset

    def __deepcopy__(self, _memo: object = None) -> Run:
        """A copy of a run is the run itself."""
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (self._identity.source,)

    def __dir__(self) -> list[str]:
        return sorted(PUBLIC)

    # ---- what a training script calls

    @property
    def project(self) -> str:
        """The project of the run."""
        return self.settings.project

    @property
    def name(self) -> str | None:
        """The name of the run. A script may set it."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._retitle(name=str(name)[:256])

    @property
    def notes(self) -> str | None:
        """Text for people. A script may set it."""
        return self._notes

    @notes.setter
    def notes(self, notes: str) -> None:
        self._retitle(notes=str(notes)[:100_000])

    @property
    def tags(self) -> list[str]:
        """The tags of the run. Setting them adds to those that are there."""
        return Tags(self._tags)

    @tags.setter
    def tags(self, tags: Iterable[str]) -> None:
        self._retitle(as_tags(tags))

    def _retitle(self, tags: Iterable[str] = (), **texts: str) -> None:
        if not self.ended:
            self.take_up(None, None, {}, [*tags], **texts)

    @property
    def url(self) -> str | None:
        """The address of the run's page; None if the run is sent to no server."""
        sends = self.settings.record is None and not self.settings.disabled
        return f"{self._sender.config.server}/run/{self.id}" if self.id and sends else None

    def log(
        self,
        metrics: Mapping[str, Any] | None = None,
        step: int | None = None,
        commit: bool | None = None,
        **foreign: Any,
    ) -> None:
        """Records numbers and media under names. Never waits for the device.

            run.log({"val": {"loss": loss, "accuracy": 0.93}, "samples": perfagent.Image(batch)})

        A nested dict is a group: this records `val.loss` and `val.accuracy`. Anything that is neither a number nor
        media is left out and counted.

        Args:
            metrics: Names and values: numbers, tensors with one element, `perfagent.Image`, `Audio`, `Table`,
                `Histogram`, or a list of one of these four.
            step: The step that the values belong to; the step in progress by default.
            commit: False if the next call of `log` belongs to the same step. It matters only in scripts without an
                optimizer.
            **foreign: Arguments of other trackers. They are left out, with a message.
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
        media: dict[str, list[Media]] | None = None
        for value in values.values():  # with cold caches half of what `issuperset(map(type, ...))` takes
            if type(value) is not float and type(value) not in _PLAIN:
                values = flat(values)
                media = self._media.take_out(values)
                later = True
                read_all_later(values)
                break
        if step is not None:
            step = self._given_at(step, values)
            if step is None:
                return
        elif (losses := p.losses).seen_backward:
            if p.last is None and p.unstepped():
                if "loss" in values and not p.logs.by_log:
                    self._explicit_loss(p.completed + 1, values["loss"])
                p.log_unstepped(self._early(values, media, commit))
                return
            step = p.completed + p.opened
            loss = values.get("loss")
            if type(loss) is float:
                losses.user_losses[step] = loss
            elif "loss" in values:
                self._explicit_loss(step, loss)
        else:
            p.log_early(self._early(values, media, commit))
            return
        if media:
            self._media.add(media, step)
        if not later:
            p.rows.append((step, 0.0, _monotonic(), values))
        elif values:
            p.rows.append(LoggedLater(step, time.time(), time.monotonic(), values))

    def alert(self, title: str, text: str = "", level: str = "warning", **foreign: object) -> None:
        """Raises an alert, which goes to the channels of the server like the alert of a rule.

        Args:
            title: One line, at most 200 characters.
            text: Details, at most 4,000 characters.
            level: "info", "warning" or "critical"; "WARN" and "ERROR" mean "warning" and "critical".
            **foreign: Arguments of other trackers. They are left out, with a message.
        """
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
            {"title": text_of(title, 200), "text": text_of(text, 4000), "level": severity},
            step=self._progress.logged_at(),
        )

    def phase(self, name: str) -> Span:
        """Measures the time of a part of the loop: `with run.phase("checkpoint"): ...`.

        The time is recorded as `phase/NAME_s`, in seconds per step, and no longer as `phase/other_s`.

        Args:
            name: 1 to 64 characters.

        Raises:
            ConfigError: The name is empty or too long.
        """
        if not isinstance(name, str) or not name or len(name) > 64:
            raise ConfigError(
                f"a phase needs a name of 1 to 64 characters such as 'checkpoint' or 'eval', not {name!r:.80}"
            )
        return Span(self._progress, name if name.isidentifier() else self._messages.phase_name(name))

    def batches(self, iterable: Iterable[Item]) -> Iterator[Item]:
        """Yields the items of an iterable, and records the wait for each as `phase/data_s`. For loops without a
        DataLoader.
        """
        return timed(self._progress, iterable)

    def verdict(self) -> Finding | None:
        """Asks the server what it says about this run. Works after the end of the run, too.

        What was measured so far is sent first, in at most 1 s.

        Returns:
            The finding with the cause, the evidence and the fix. None if the run is sent to no server (a recording, a
                forked child, PERFAGENT_DISABLED). None with a warning if the server does not answer within 2 s, does
                not know the run yet, or the key may not read.
        """
        if self.id is None or self.inherited or self.url is None:
            return None
        self._sender.flush(1.0)
        return verdict.ask(self.id, self._sender.config, self._sender.tell)

    def finish(self, status: str | int | None = None, *, exit_code: int | None = None, **_foreign: object) -> None:
        """Ends the run, and sends what is left, in at most 1.5 s.

        Args:
            status: "finished" (default), "failed", "oom", "killed", "preempted", or an exit code.
            exit_code: W&B's name for an exit code as `status`.
            **_foreign: Arguments of other trackers, such as `quiet`. They are left out.

        Raises:
            ConfigError: There is no such status.
        """
        status = exit_code if status is None else status
        given = "finished" if status is None else status
        ending, reason = of_exit_code(int(given)) if isinstance(given, int) else (given, {})
        if ending not in END_STATES:
            raise ConfigError(f"status must be one of {', '.join(END_STATES)} or an exit code, not {status!r:.80}")
        self._end(ending, reason)

    def end_for(self, to: AgentConfig) -> None:
        """Ends, since the process goes on with another run, of these settings."""
        self._sender.followed = to.sources
        self.finish()

    def __repr__(self) -> str:
        return self._shown().text()

    def _repr_html_(self) -> str:
        """HTML for a notebook, with the server's verdict and the curve of the loss if there are any."""
        if self.id is None or self.inherited or self.url is None:
            return self._shown().html()
        return self._shown().html(*verdict.with_losses(self.id, self._sender.config))

    def show(self, every_s: float = 2.0) -> None:
        """Shows the run in a notebook, and updates the output until the run has ended, while the cells below it train.

        Outside of a notebook the run is printed once.

        Args:
            every_s: Seconds between two updates.
        """
        show_live(self, lambda: self.ended, every_s)

    def _shown(self) -> Shown:
        name = self.name or self._default_name() or self.id or ""
        place = self.url or (f"recorded in {self.settings.record}" if self.settings.record is not None else None)
        if self.settings.disabled:
            return Shown(name, "disabled", None, None, None)
        p = self._progress
        logged = self._given_step >= 0 or p.logs.first_logged >= 0 or p.early or self._sender.logged[0] > 0
        running = "running" if p.last is not None or logged else "starting"
        ended = self._sender.final or ("given up" if self._sender.disabled else running)
        how = "forked child" if self.inherited else ended
        return Shown(name, how, p.done_at() or None, self._sender.newest_loss, place)

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
    def steps_done(self) -> int:
        """The number of optimizer steps that have ended."""
        return self._progress.completed

    @property
    def should_stop(self) -> bool:
        """Whether the run was stopped from outside and this was its last step, for loops that end by themselves.

        Read it after each step: all ranks get the same answer after the same step. Only a loop that reads it, or a
        script that called `attach(stoppable=True)`, can be stopped.
        """
        return self._investigator.stop.read()

    def allow_stop(self) -> None:
        """As attach(stoppable=True)."""
        self._investigator.stop.raises = True

    # ---- details

    def _given_at(self, step: Any, values: dict[str, Any]) -> int | None:
        """The step that a call of log() names; None if that is none."""
        try:
            number = operator.index(step)
        except TypeError:
            number = -1
        if not 0 <= number <= MAX_STEP:  # the server takes no other; the next step would be one more
            self._messages.no_step(step)
            return None
        if number < self._given_step and any(name in values for name in self._given):
            self._messages.warn("step back", step=number, newest=self._given_step)
        self._given_step, self._given = number, (*values,)
        logs = self._progress.logs
        logs.early_step = max(logs.early_step, number + 1)
        if "loss" in values:
            self._explicit_loss(number, values["loss"])
        return number

    def _early(self, values: dict[str, Any], media: dict[str, list[Media]] | None, commit: bool | None) -> EarlyLog:
        early = EarlyLog(time.time(), time.monotonic(), values, commit)
        if media:
            self._media.add(media, early)
        return early

    def _explicit_loss(self, step: int, value: Any) -> None:
        """The user's own loss stands for its step; a number that is still on its way cannot be compared with ours."""
        p = self._progress
        is_number = type(value) is float or (type(value) is int and abs(value) < 1e300)
        if step == p.completed + 1 or (p.last is not None and p.last.step == step):
            p.losses.user_losses[step] = float(value) if is_number else math.nan
        else:  # steps counted in another way: two counts in one series would be nonsense
            self._sender.reader.loss_by_user = True

    def _is_over(self, call: str) -> None:
        """A call that comes too late is left out, and that is said once."""
        if self.ended and not self.inherited and not self.settings.disabled:
            self._messages.warn("late", call, call=call, run=self.called)


add_names_of_others(Run)


def _unpickled(source: str) -> Run:
    """By its name in pickles."""
    run: Run = importlib.import_module("perfagent.session").unpickled(source)
    return run
