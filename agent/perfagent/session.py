"""The current run of this process: attach, init, log, alert, finish.

One run per process. `attach` starts the sender, puts the hooks in and returns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from perfagent.agent_config import AgentConfig
from perfagent.boundary.guard import logger
from perfagent.calls.arguments import as_dict, as_tags, check_arguments
from perfagent.calls.other_trackers import options_of_init, say_once
from perfagent.calls.wrong_calls import checked
from perfagent.errors import ConfigError
from perfagent.integrations.hydra import is_next_job
from perfagent.integrations.process_pools import end_with_task
from perfagent.process import launch_options as launched
from perfagent.process.variables import warn_of_misspelt
from perfagent.process_end import ProcessEnd
from perfagent.run import Run

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Run", "alert", "attach", "current", "finish", "init", "join", "log", "start_from_launcher", "unpickled"]

_current: Run | None = None
_launched: Run | None = None
_named = False
"""Whether the script gave the launched run a name or project: another one begins another run then, as in plain
Python."""
_resumed: tuple[str | None, int] | None = None
_inert: str | None = None
"""Why no run may begin now."""
_end = ProcessEnd(lambda: _current)


# ---- the documented functions ----------------------------------------------------------------------------------------


@checked
def attach(
    model: nn.Module | None = None,
    optimizer: object = None,
    *,
    project: str | None = None,
    name: str | None = None,
    config: object = None,
    tags: Iterable[str] = (),
    group: str | None = None,
    server: str | None = None,
    record: str | os.PathLike[str] | None = None,
    tensorboard: str | os.PathLike[str] | None = None,
    run_id: str | None = None,
    start_step: int | None = None,
    notes: str | None = None,
    tune_malloc: bool | None = None,
    capture_logs: bool | None = None,
    disabled: bool | None = None,
    stoppable: bool = False,
) -> Run:
    """Monitors the training in this process from now on, and returns the run. The training loop stays as it is.

    Trouble of perfagent's own, such as a server that does not answer, raises nothing. Call `attach` on every rank. A
    second call with the same place and name continues the run; with others, it ends the run and begins a new one.

    Args:
        model: The module that is trained. Found by itself if it is not given.
        optimizer: Its optimizer. Found by itself if it is not given.
        project: The project of the run; "default" by default.
        name: A name for people, at most 256 characters; the script and the first 4 characters of the id by default.
        config: Hyperparameters: a dict, dataclass or namespace. `run.config` can be extended later.
        tags: Labels to filter by. A run with the tag "keep" is never deleted by retention.
        group: A name that several runs have in common, such as the runs of one sweep.
        server: The address of the server; PERFAGENT_SERVER by default, else your server on this machine.
        record: A folder to record into, without a server; `perfagent sync FOLDER` uploads it.
        tensorboard: A folder that also gets TensorBoard event files.
        run_id: The run's id; random by default. An id that exists begins a new attempt of that run.
        start_step: The number of the first step, if the training is resumed.
        notes: Text for people.
        tune_malloc: False leaves glibc's allocator alone. By default two of its thresholds are raised, so that a step
            on the CPU keeps its memory.
        capture_logs: False leaves out what the script logs through other loggers (W&B, TensorBoard, a trainer's own).
        disabled: True records, sends and prints nothing for this run.
        stoppable: True lets `perfagent stop`, the run's page or a rule end the training, after the same step on all
            ranks. A trainer ends by its own flag, a loop that reads `run.should_stop` by itself, and any other by
            `perfagent.Stopped`.

    Raises:
        ConfigError: An argument cannot be used.
    """
    return _attach(**locals())


@checked
def init(
    project: str | None = None,
    name: str | None = None,
    *,
    config: object = None,
    tags: Iterable[str] | None = (),
    group: str | None = None,
    server: str | None = None,
    record: str | os.PathLike[str] | None = None,
    tensorboard: str | os.PathLike[str] | None = None,
    run_id: str | None = None,
    start_step: int | None = None,
    notes: str | None = None,
    tune_malloc: bool | None = None,
    capture_logs: bool | None = None,
    disabled: bool | None = None,
    stoppable: bool = False,
    **foreign: object,
) -> Run:
    """Begins a run without a model: for scripts that log by themselves, and for loops whose model is found later.

    Args:
        project: The project of the run; "default" by default.
        name: A name for people; the script and the first 4 characters of the id by default.
        config: Hyperparameters: a dict, dataclass or namespace.
        tags: Labels to filter by.
        group: A name that several runs have in common.
        server: The address of the server.
        record: A folder to record into, without a server.
        tensorboard: A folder that also gets TensorBoard event files.
        run_id: The run's id; random by default.
        start_step: The number of the first step, if the training is resumed.
        notes: Text for people.
        tune_malloc: False leaves glibc's allocator alone.
        capture_logs: False leaves out what the script logs through other loggers.
        disabled: True records, sends and prints nothing for this run.
        stoppable: True lets the run be stopped from outside; see `attach`.
        **foreign: Options of W&B and trackio, for scripts that say `import perfagent as wandb`. Used where perfagent
            has the same (`id`, `mode`, `reinit` ...), else left out, with a message.

    Raises:
        ConfigError: An argument cannot be used.
    """
    own = {name: value for name, value in locals().items() if name != "foreign"}
    own["tags"] = as_tags(() if tags is None else tags)
    options, left_out = options_of_init(own, foreign)
    if foreign.get("reinit") in (True, "finish_previous", "create_new"):
        finish()
    run = attach(**options)
    if not run.settings.disabled:
        for option, sentence in left_out.items():
            say_once(f"init {option}", sentence)
    return run


def log(
    metrics: Mapping[str, Any] | None = None, step: int | None = None, commit: bool | None = None, **foreign: object
) -> None:
    """Records numbers and media in the current run: `Run.log`.

    Args:
        metrics: Names and values: numbers, tensors with one element, `perfagent.Image`, `Audio`, `Table` or
            `Histogram`.
        step: The step that the values belong to; the step in progress by default.
        commit: False if the next call of `log` belongs to the same step.
        **foreign: Arguments of other trackers. They are left out, with a message.
    """
    if _current is not None:
        _current.log(metrics, step, commit, **foreign)
    else:
        _no_run("log")


def alert(title: str, text: str = "", level: str = "warning", **foreign: object) -> None:
    """Raises an alert in the current run: `Run.alert`.

    Args:
        title: One line, at most 200 characters.
        text: Details, at most 4,000 characters.
        level: "info", "warning" or "critical".
        **foreign: Arguments of other trackers. They are left out, with a message.
    """
    if _current is not None:
        _current.alert(title, text, level, **foreign)
    else:
        _no_run("alert")


def finish(status: str | int | None = None, *, exit_code: int | None = None, **foreign: object) -> None:
    """Ends the current run: `Run.finish`. Does nothing if there is none.

    Args:
        status: "finished" (default), "failed", "oom", "killed", "preempted", or an exit code.
        exit_code: W&B's name for an exit code as `status`.
        **foreign: Arguments of other trackers. They are left out.
    """
    if _current is not None:
        _current.finish(status, exit_code=exit_code, **foreign)


def current() -> Run | None:
    """The run of this process, if one was started and has not ended."""
    return _current if _current is not None and not _current.ended else None


def join(model: nn.Module | None = None, **options: Any) -> Run:
    """Run for a class of ours that another library knows by name: the run that the script has begun keeps its name and
    place, and takes up the model; where there is none, `attach(model, **options)`."""
    run = current()
    return attach(model, **options) if run is None or (run is _launched and not _named) else attach(model)


def resumed_at(run_id: str | None, start_step: int) -> None:
    """A training went on from a checkpoint of that run: whoever attaches next continues it, from that step on."""
    global _resumed
    _resumed = (run_id, start_step)


@contextlib.contextmanager
def inert(why: str) -> Iterator[None]:
    """Within, attach() and init() begin no run: the script is only looked at. why: for the line that says so."""
    global _inert
    before, _inert = _inert, why
    try:
        yield
    finally:
        _inert = before


def start_from_launcher(**options: Any) -> Run:
    """What `perfagent run` calls when the script has imported torch: a run without a word in the script.

    options: as of `init`. An `attach()` in the script then continues this run instead of starting another.
    """
    global _launched, _named
    _launched = attach(**options)
    _named = False
    return _launched


def _attach(
    model: nn.Module | None, optimizer: object, *, project: str | None, name: str | None, config: object, tags: Iterable[str],
    group: str | None, server: str | None, record: str | os.PathLike[str] | None,
    tensorboard: str | os.PathLike[str] | None, run_id: str | None, start_step: int | None, notes: str | None,
    tune_malloc: bool | None, capture_logs: bool | None, disabled: bool | None, stoppable: bool,
) -> Run:  # fmt: skip
    """As `attach`."""
    global _named
    check_arguments(
        model, optimizer, start_step, stoppable, name=(name, 256), group=(group, 256), notes=(notes, 100_000)
    )
    entries, labels = as_dict(config), as_tags(tags)
    silent_one = _silent_run(entries, labels)
    if silent_one is not None:
        return silent_one
    run = current()
    job = is_next_job() and not _is_given(run_id)  # with an id that was given all jobs are that run
    run_id, start_step = _where_resumed(run_id, start_step)
    options = launched.current or launched.NONE  # what `perfagent run` was given stands where the script says nothing
    if (
        run is not None
        and not job
        and _keeps(run, model, project, name, run_id, start_step, moves=_elsewhere(run, server, record))
    ):
        if start_step not in (None, run.start_step):
            run.continue_as(None, start_step)
        run.warn_of_next_training(model)
        run.take_up(model, optimizer, entries, labels, project=project, name=name, group=group, notes=notes)
        run.change(tensorboard=tensorboard, tune_malloc=tune_malloc, capture_logs=capture_logs, stoppable=stoppable)
        _named = _named or bool(name or project)
        return run
    settings = AgentConfig.from_env(
        project=options.project if project is None else project, server=server, record=record or options.record,
        tensorboard=tensorboard,
        run_id=run_id or options.run_id, tune_malloc=tune_malloc, capture_logs=capture_logs, disabled=disabled,
    )  # fmt: skip
    start = _start_of(run, options, job=job)
    if run is not None:
        _end_for(run, settings, expected=job)
    labels.extend(tag for tag in options.tags if tag not in labels)
    run = Run(
        settings, name=name or options.name, config=entries, tags=labels, group=group, start_step=start_step, notes=notes,
        start=start,
    )  # fmt: skip
    run.take_up(model, optimizer, {}, [])
    return _begin(run, stoppable)


def _silent_run(config: dict[str, Any], tags: list[str]) -> Run | None:
    """What attach() returns where no run may begin: one that records nothing, or in a forked child that of its parent."""
    if _is_inert():
        if _inert is not None:
            logger.warning("perfagent: attach() or init() begins no run here: %s", _inert)
        return silent(config, tags)
    run = current()
    if run is None or not run.inherited:
        return None
    say_once(
        "inherited",
        "attach() records nothing in a child that was forked from a process with a run; attach in the children only, or "
        "start them with 'spawn'",
    )
    return run


def _is_inert() -> bool:
    """Also where multiprocessing, which starts workers by `spawn`, is importing the script anew in one: it holds no
    training."""
    processes = sys.modules.get("multiprocessing.process")
    spawned = processes is not None and getattr(processes.current_process(), "_inheriting", False)
    return _inert is not None or spawned


def silent(config: dict[str, Any], tags: list[str]) -> Run:
    """A run that records nothing."""
    settings = dataclasses.replace(AgentConfig.from_env(), disabled=True)
    return Run(settings, name=None, config=config, tags=tags, group=None, start_step=None)


def _is_given(run_id: str | None) -> bool:
    return bool(run_id or os.environ.get("PERFAGENT_RUN_ID") or (launched.current or launched.NONE).run_id)


def _elsewhere(run: Run, server: str | None, record: str | os.PathLike[str] | None) -> bool:
    """Whether these mean another place than the one where the run's data go: a folder, or a server where there is
    none."""
    if server is None and record is None:
        return False
    said = AgentConfig.from_env(server=server, record=record or (launched.current or launched.NONE).record)
    return (said.record or said.server) != (run.settings.record or run.settings.server)


def _where_resumed(run_id: str | None, start_step: int | None) -> tuple[str | None, int | None]:
    """Run and first step of a training that went on from a checkpoint, unless the script names another run."""
    global _resumed
    if _resumed is None or run_id not in (None, _resumed[0]):
        return run_id, start_step
    (resumed, step), _resumed = _resumed, None
    return resumed or run_id, step if start_step is None else start_step


def _keeps(
    run: Run,
    model: nn.Module | None,
    project: str | None,
    name: str | None,
    run_id: str | None,
    start_step: int | None,
    *,
    moves: bool,
) -> bool:
    """Whether attach() goes on with the current run. Each training is a run of its own, and under an id that was given an
    attempt of its own. moves: it names another place."""
    unnamed = run is _launched and not _named
    if unnamed and run_id is not None and not moves and run.settings.run_id is None:
        run.continue_as(AgentConfig.from_env(run_id=run_id).run_id, start_step, given=True)
    same = unnamed or (name in (None, run.name) and project in (None, run.settings.project))
    next_training = (name is not None or run_id is not None) and run.trains_another(model)
    return same and run_id in (None, run.id) and not moves and not next_training


def _start_of(run: Run | None, options: launched.LaunchOptions, *, job: bool) -> launched.Start:
    """A launched run that goes elsewhere goes as what it is; a later run of the process is no new attempt of it."""
    if _current is None:
        return options.start
    if options is not launched.NONE and run is not None and run is _launched and not _named and not job:
        return launched.Start(run.id)
    return launched.Start()


def _begin(run: Run, stoppable: bool) -> Run:
    global _current
    if stoppable:
        run.allow_stop()
    if not run.settings.disabled:
        warn_of_misspelt(lambda sentence: logger.warning("perfagent: %s", sentence))
        _end.watch()
    run.start()
    end_with_task(run.finish)
    _current = run
    return run


def _no_run(function: str) -> None:
    with contextlib.suppress(ConfigError):  # attach() raises it; a call of log() must not
        if not _is_inert() and not AgentConfig.from_env().disabled:
            say_once(function, f"{function}() was called before attach() or init(); left out")


def _end_for(run: Run, settings: AgentConfig, *, expected: bool) -> None:
    """The run ends because another begins; expected: each of Hydra's jobs is a run of its own, as its user wants it."""
    if not settings.disabled:
        logger.log(
            logging.INFO if expected else logging.WARNING,
            "perfagent: attach() or init() was called again with another name, project, place or model: the run %s is now "
            "finished, and a new run starts. Call finish() before, or attach() without arguments to continue the run",
            run.called,
        )
    run.end_for(settings)


def unpickled(source: str) -> Run:
    """The run that was pickled, in its own process; one that records nothing in a spawned worker or a later process."""
    run = current()
    return run if run is not None and run._identity.source == source else silent({}, [])
