"""`perfagent.tune`: one change at a time to a training, each measured against the best so far, kept when it pays.

A change is measured in turns with what it is compared with, over the same number of steps, so that a machine that slows
down slows both. What is changed is put back at the end: the answer is a report, not a trained model."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_count
from perfagent_loop.kinds import Batch
from perfagent_loop.meta_copy import mapped
from perfagent_loop.precision import Precision, autocast_of
from perfagent_loop.search.batch_size import search_batch_size
from perfagent_loop.search.job import TuningJob, checked_loss
from perfagent_loop.search.trial_state import restoring_state
from perfagent_loop.search.workers import Endless, more_workers_than_cores, search_num_workers

__all__ = ["Setting", "TuningReport", "TuningStep", "tune"]

LEAST_GAIN = 0.03
"""A change that brings less is left out: repeated measurements of the same thing differ by as much."""
_HOPELESS = 0.7
"""A change that is slower than this in one round gets no other."""
_BUSY = 0.5
"""From so many programs a core on, that want to run before the search has begun, it is these that are measured."""
_NOISY_PCT = 15.0
_LONGEST_S = 3.0
"""A block of steps ends after this time, whatever the number of steps."""
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything that a search may change."""

    batch_size: int
    num_workers: int
    precision: Precision
    pin_memory: bool = False
    fused_optimizer: bool = False
    channels_last: bool = False
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class TuningStep:
    """One change, measured in turns with the best so far.

    before, after: samples a second without and with it, medians over the rounds. kept: it brought more than 3 % and was
    ahead in every round. spread_pct: how far the rounds of one side lie apart, in percent of their median. remark: what
    to look at where it is kept, why it is left out where it is not."""

    change: str
    before: float
    after: float
    kept: bool
    remark: str = ""
    spread_pct: float = 0.0

    @property
    def gain_pct(self) -> float:
        return 100 * (self.after / self.before - 1)


@dataclass(frozen=True, slots=True)
class TuningReport:
    """samples_per_s: of the training as it was given. setting: the best that was found. gain_pct: of all that was kept
    together, measured at the end in turns with the training as given. load: programs that wanted a core when the search
    began, for each core (None where the system does not count them). spread_pct: the median of the steps' own."""

    samples_per_s: float
    steps: list[TuningStep]
    setting: Setting
    gain_pct: float
    load: float | None = None
    spread_pct: float = 0.0

    @property
    def noise(self) -> str:
        """Why the figures are not to be trusted; empty where nothing speaks against them."""
        signs = []
        if self.load is not None and self.load > _BUSY:
            signs.append(f"other programs kept {100 * self.load:.0f} % of this machine's cores busy")
        if self.spread_pct > _NOISY_PCT:
            signs.append(f"rounds of the same setting lay {self.spread_pct:.0f} % apart")
        return " and ".join(signs)


OnStep: TypeAlias = Callable[[TuningStep], None]


def tune(
    job: TuningJob,
    *,
    steps: int = 20,
    rounds: int = 3,
    largest_batch: int | None = None,
    compiling: bool | None = None,
    on_step: OnStep | None = None,
) -> TuningReport:
    """Searches for a faster setting of a training: one change at a time, measured in turns with the best so far.

    In this order: num_workers, pin_memory (CUDA), bf16, the fused optimizer, channels_last (2-d convolutions),
    torch.compile, and batches of twice, four and eight times the size. Model, optimizer and random generators are
    restored. A small training takes about a minute.

    Args:
        job: The training.
        steps: Steps of each side of a comparison.
        rounds: How often the two sides take turns.
        largest_batch: The largest batch size; eight times the current one by default, on CUDA what fits.
        compiling: Whether to try torch.compile, which takes a minute; on CUDA by default.
        on_step: Called after every step.

    Returns:
        A report to print, with `setting`, the best that was found, `gain_pct`, and `samples_per_s` of the training as
            it was given.

    Raises:
        ConfigError: `job` is no TuningJob.
    """
    if not isinstance(job, TuningJob):
        raise ConfigError(f"tune takes a perfagent.TuningJob, not {type(job).__name__}")
    check_count("steps", steps)
    check_count("rounds", rounds)
    check_count("largest_batch", largest_batch, "a number of samples", or_none=True)
    given = Setting(batch_size=job.batch_size, num_workers=job.num_workers, precision=job.precision)
    load = None
    with contextlib.suppress(OSError):
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
    with restoring_state(job.loss, [job.model, job.optimizer]):
        search = _Search(job, given, steps, rounds, on_step)
        search.run(largest_batch, job.device.type == "cuda" if compiling is None else compiling)
        if search.best == given:
            as_given, gain_pct = search.first or search.in_turns(given, given)[0], 0.0
        else:
            as_given, best = search.in_turns(given, search.best)
            gain_pct = 100 * (best / as_given - 1)
    spread_pct = statistics.median(step.spread_pct for step in search.done) if search.done else 0.0
    return TuningReport(as_given, search.done, search.best, gain_pct, load, spread_pct)


class _Search:
    def __init__(self, job: TuningJob, given: Setting, steps: int, rounds: int, on_step: OnStep | None) -> None:
        self._job, self._steps, self._rounds, self._on_step = job, steps, rounds, on_step
        self.best = given
        self.first: float | None = None
        self.done: list[TuningStep] = []

    def run(self, largest_batch: int | None, compiling: bool) -> None:
        self._workers()
        if self._job.device.type == "cuda":
            self._try("pin_memory=True", pin_memory=True)
        bf16 = self._job.device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
        if self.best.precision == "fp32" and bf16:
            self._try("precision='bf16'", "computes in half precision: compare the loss curves", precision="bf16")
        optimizer = self._job.optimizer
        if type(optimizer) in _FUSED and not any(group.get("fused") for group in optimizer.param_groups):
            self._try("optimizer: fused=True", fused_optimizer=True)
        if any(isinstance(module, nn.Conv2d) for module in self._job.model.modules()):
            self._try("model.to(memory_format=torch.channels_last)", channels_last=True)
        if compiling:
            self._try("torch.compile", compiled=True)
        self._batches(largest_batch)

    def in_turns(self, one: Setting, other: Setting) -> tuple[float, float]:
        """Samples a second of two settings, medians over the rounds."""
        rates = self._rounds_of(one, other, empty=True)
        return statistics.median(rates[0]), statistics.median(rates[1])

    def _rounds_of(self, one: Setting, other: Setting, *, empty: bool) -> tuple[list[float], list[float]]:
        """The rates of every round. empty: the loader's queue is emptied first, where it is the loader that differs."""
        rates: tuple[list[float], list[float]] = ([], [])
        with _Training(self._job, one) as first, _Training(self._job, other) as second:
            for _ in range(self._rounds):
                for training, found in ((first, rates[0]), (second, rates[1])):
                    training.warm(empty=empty)
                    found.append(training.rate(self._steps))
                if rates[1][-1] < _HOPELESS * rates[0][-1]:
                    break
        return rates

    def _try(self, change: str, remark: str = "", *, empty: bool = False, **changed: Any) -> bool:
        candidate = replace(self.best, **changed)
        rates = self._rounds_of(self.best, candidate, empty=empty)
        before, after = (statistics.median(side) for side in rates)
        why_not = _left_out(*rates)
        if self.first is None:
            self.first = before
        if not why_not:
            self.best = candidate
        spread_pct = max(100 * (max(side) - min(side)) / statistics.median(side) for side in rates)
        step = TuningStep(change, before, after, not why_not, why_not or remark, spread_pct)
        self.done.append(step)
        if self._on_step is not None:
            self._on_step(step)
        return not why_not

    def _workers(self) -> None:
        job = self._job
        found, trials = search_num_workers(lambda n: job.loader(workers=n), None, batches=self._steps, most_s=3.0)
        if found == self.best.num_workers:
            return
        seconds = next(trial.seconds for trial in trials if trial.workers == found) or math.inf
        remark = f"the loader alone: {job.batch_size / seconds:,.0f} samples/s"
        self._try(f"num_workers={found}", remark, empty=True, num_workers=found)

    def _batches(self, largest: int | None) -> None:
        """Larger batches change what is learned in a step; that is said, not decided."""
        first = self.best.batch_size
        largest = min(largest or 8 * first, len(self._job.dataset))  # type: ignore[arg-type]
        if largest < 2 * first:
            return
        with _Training(self._job, self.best) as training:
            fits, _ = search_batch_size(training.step_of, first, largest)
        size, remark = 2 * first, "fewer, larger steps: look at the learning rate again"
        while size <= fits and self._try(f"batch_size={size}", remark, batch_size=size):
            size *= 2


def _left_out(without: list[float], with_it: list[float]) -> str:
    """Why a change does not pay, by its rates without and with it in each round; empty where it pays."""
    gain = statistics.median(with_it) / statistics.median(without) - 1
    if gain < 0:
        return "slower"
    if gain <= LEAST_GAIN:
        return f"gains less than {100 * LEAST_GAIN:.0f} %"
    behind = sum(other <= first for first, other in zip(without, with_it, strict=True))
    return f"slower in {behind} of {len(without)} rounds: noise" if behind else ""


class _Training:
    """A job under a setting, to be stepped. What it changes of the model is undone at the end."""

    def __init__(self, job: TuningJob, setting: Setting) -> None:
        self._job, self._setting = job, setting
        self._device = job.device
        self._optimizer = _fused(job.optimizer) if setting.fused_optimizer else job.optimizer
        self._loss: Callable[[nn.Module, Any], Any] = torch.compile(job.loss) if setting.compiled else job.loss
        self._autocast = autocast_of(setting.precision, self._device)
        with more_workers_than_cores():
            size, workers = setting.batch_size, setting.num_workers
            self._loader = job.loader(batch_size=size, workers=workers, pin=setting.pin_memory)
        self._batches = Endless(self._loader)
        self._samples: list[Any] = []

    def __enter__(self) -> _Training:
        return self

    def __exit__(self, *_error: object) -> None:
        self._batches.close()
        self._job.optimizer.zero_grad(set_to_none=True)
        if self._setting.channels_last:
            self._job.model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def warm(self, *, empty: bool) -> None:
        """Two steps that are not counted; more where the queue of the workers is to be emptied."""
        layout = torch.channels_last if self._setting.channels_last else torch.contiguous_format
        self._job.model.to(memory_format=layout)  # type: ignore[call-overload]
        for _ in range(2 + (2 * self._setting.num_workers if empty else 0)):
            self._step(self._batches.next())

    def rate(self, steps: int) -> float:
        """Samples a second over at least so many steps, data and device included. Batches come in turns of the workers,
        many at once and then none: whole turns are timed."""
        turn = max(1, self._setting.num_workers)
        steps, done = -(-steps // turn) * turn, 0
        self._wait()
        begin = time.perf_counter()
        while done < steps and time.perf_counter() - begin < _LONGEST_S:
            self._step(self._batches.next())
            done += 1
        self._wait()
        return done * self._setting.batch_size / (time.perf_counter() - begin)

    def step_of(self, size: int) -> None:
        """A step with a batch of any size, of samples that are read once."""
        while len(self._samples) < size:
            self._samples.append(self._job.dataset[len(self._samples)])
        collate: Any = self._loader.collate_fn
        self._step(collate(self._samples[:size]))

    def _step(self, batch: Batch) -> None:
        batch = mapped(batch, lambda tensor: tensor.to(self._device, non_blocking=True))
        with self._autocast or contextlib.nullcontext():
            loss = checked_loss(self._loss(self._job.model, batch))
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _fused(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same kind of optimizer over the same groups, in its fused version."""
    groups = [{**group, "fused": True, "foreach": False} for group in optimizer.param_groups]
    kind: Any = type(optimizer)
    made: torch.optim.Optimizer = kind(groups, lr=optimizer.defaults["lr"], fused=True)
    return made
