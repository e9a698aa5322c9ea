"""The loader's batches: where windows end, what they hold, on which device, and from where to go on.

The loop must know a window's last micro-step before its forward pass. A loader that can say its length is simply
counted; of others one batch more is fetched. With `items`, a whole window is fetched first.

To go on in the middle of an epoch, the random generators are put back to its begin, the loader is started, the batches
that were seen are passed over, and the generators are put to where they were then. Batches of a map-style DataLoader
are passed over without loading them; a torchdata StatefulDataLoader gets its state."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from perfagent.errors import ConfigError
from perfagent_loop import randomness
from perfagent_loop.accumulation import Count, Window
from perfagent_loop.collectives import all_gather, rest
from perfagent_loop.data.prefetch import timed
from perfagent_loop.data.transfer import CopyStream, moved
from perfagent_loop.kinds import Batch, Loader, State
from perfagent_loop.strategies import Strategy

__all__ = ["Batches", "length_of"]

logger = logging.getLogger("perfagent")
Items = Callable[[Batch], Count]


class Steps(Protocol):
    """Whoever steps with the batches: loop.Loop."""

    def goes_on(self) -> bool: ...
    def step(self) -> object: ...
    def discard_window(self) -> None: ...


class Batches:
    """Where the loop is in its data, and the reading of it.

    epoch: how many were completed. batch: batches of this epoch that were handed out."""

    def __init__(self, window: Window, strategy: Strategy) -> None:
        self._window, self._strategy = window, strategy
        self.epoch = self.batch = 0
        self._of_call = 0  # the epoch, counted from the call of read()
        self._began: State | None = None  # the random generators when this epoch began
        self._loader: Any = None
        self._kept: Any = None  # the state of a loader from which more was fetched than handed out
        self._reached = (0, 0, 0)  # epoch, batch and epoch of the call at the last boundary
        self._resumed: State | None = None
        # whether `batch` is that of another number of ranks, converted: the epoch may be shorter
        self._estimated = False
        # micro-steps of an epoch's last window on all ranks together, where they differ
        self._last_steps: int | None = None

    def read(self, loader: Iterable[Batch], epochs: int | None, items: Items | None, loop: Steps) -> Iterator[Batch]:
        """The batches of so many epochs; a window that the loader's end cut short is stepped at that end."""
        try:
            yield from self._read(loader, epochs, items, loop)
        finally:
            if self._strategy.world > 1 and self._strategy.device.type == "cpu":
                rest()  # a script may end with its loop

    def _read(self, loader: Iterable[Batch], epochs: int | None, items: Items | None, loop: Steps) -> Iterator[Batch]:
        resumed, self._resumed = self._resumed, None
        self._loader = loader
        if self._window.done:  # the loop before was left in the middle of a window
            loop.discard_window()
        if resumed is None:
            if self.batch:  # ... or of an epoch
                self.epoch += 1
            self.batch = self._of_call = 0
        to_device = _to(self._strategy.device)
        while (epochs is None or self._of_call < epochs) and loop.goes_on():
            parts: list[Any] = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
            for one in parts:
                if hasattr(one, "set_epoch"):  # first, as lengths may depend on it
                    one.set_epoch(self.epoch)
            length = self._agree(loader)
            source = self._source(loader, resumed)
            resumed = None
            before = self.batch
            # gradients that are averaged early need the length of the last window before it begins
            early = self._strategy.reduces_early and length is None and self._window.size > 1
            if items is not None or early:
                batches = self._look_ahead(loader, source, items or (lambda _: 1))
            else:
                batches = self._one_ahead(loader, source) if length is None else self._count_down(source, length)
            for batch in batches:
                self.batch += 1
                yield to_device(batch)
                if not self._window.done and not loop.goes_on():
                    return
            if self.batch == before == 0:
                raise ConfigError("the loader gave no batch; loop.batches() reads it once an epoch: not an iterator")
            if self._window.done:
                self._cut_short(length, loop)
            self.epoch, self.batch, self._of_call = self.epoch + 1, 0, self._of_call + 1

    def _cut_short(self, length: int | None, loop: Steps) -> None:
        """The loader ended before its length, in the middle of a window."""
        if self._strategy.world > 1:
            raise ConfigError(
                f"the loader has a length of {length} batches and gave {self.batch}: the last window's gradients were never "
                "averaged over the ranks; give it its right length, or no __len__ at all"
            )
        self._window.end = self._window.done
        loop.step()

    def _count_down(self, source: Iterator[Batch], length: int) -> Iterator[Batch]:
        window = self._window
        for batch in source:
            end = window.done + max(1, length - self.batch)
            if end <= window.size:
                window.will_end(end, self._last_steps)
            yield batch

    def _one_ahead(self, loader: Loader, source: Iterator[Batch]) -> Iterator[Batch]:
        window = self._window
        window.may_differ(self._strategy.world > 1)
        self._keep(loader)
        batch = next(source, _END)
        while batch is not _END:
            if window.done + 1 >= window.size:  # nothing is ahead where a checkpoint may be saved: what a dataset draws
                self._kept = None  # from the process's generators comes after the state that is saved of them
                window.will_end(window.size)
                yield batch
                self._keep(loader)
                batch = next(source, _END)
            else:
                following = next(source, _END)
                window.will_end(window.done + 1 if following is _END else window.size)
                yield batch
                batch = following
        self._kept = None

    def _look_ahead(self, loader: Loader, source: Iterator[Batch], items: Items) -> Iterator[Batch]:
        window = self._window
        while True:
            held = [*itertools.islice(source, max(1, window.size - window.done))]
            if not held:
                break
            self._keep(loader)
            window.will_hold([items(batch) for batch in held])
            yield from held
        self._kept = None

    def _keep(self, loader: Loader) -> None:
        """The state of a loader that has one, before more is fetched than the window at hand needs."""
        self._kept = loader.state_dict() if hasattr(loader, "state_dict") else None

    def _agree(self, loader: Loader) -> int | None:
        """The batches of an epoch, None where the loader cannot say. A collective: ranks must agree."""
        self._window.may_differ(False)
        self._last_steps = None
        length, strategy = length_of(loader), self._strategy
        if strategy.world == 1:
            return length
        mine = torch.tensor([-1 if length is None else length], device=strategy.device)
        others = [torch.empty_like(mine) for _ in range(strategy.world)]
        all_gather(others, mine, group=strategy.group)
        lengths = [int(one) for one in others]  # sync: once an epoch
        if min(lengths) < 0:
            return None
        size = self._window.size
        windows = {-(-one // size) for one in lengths}
        if len(windows) > 1:
            raise ConfigError(
                f"the ranks' loaders have {', '.join(map(str, lengths))} batches: some would make more steps than others, and "
                "wait for ever; use a DistributedSampler, or drop_last=True"
            )
        if len(set(lengths)) > 1:
            self._last_steps = sum((one - 1) % size + 1 for one in lengths)
        return length

    def reached(self) -> None:
        """An optimizer step is over: this is where a checkpoint goes on."""
        self._reached = (self.epoch, self.batch, self._of_call)

    def state(self) -> tuple[State, Any]:
        """The position at the last boundary, and the loader's own state where it has one."""
        epoch, batch, of_call = self._reached
        drawn = [randomness.generator_state(one) for one in randomness.generators_of_samples(self._loader)]
        position = {
            "epoch": epoch,
            "batch": batch,
            "epoch_of_call": of_call,
            "epoch_random": self._began,
            "generators": drawn,
        }
        return position, self._sampler_state()

    def resume(self, position: Mapping[str, Any], sampler: Any, random: State | None) -> None:
        """The next read() goes on from there."""
        self.epoch, self.batch, self._of_call = position["epoch"], position["batch"], position["epoch_of_call"]
        self._began = position.get("epoch_random")
        self._estimated = bool(position.get("estimated"))
        self.reached()
        self._resumed = {"sampler": sampler, "random": random, "generators": position.get("generators", [])}

    def _sampler_state(self) -> Any:
        loader = self._loader
        if not hasattr(loader, "state_dict"):
            return None
        if self.batch and (self.epoch, self.batch) != self._reached[:2]:
            # within a window (after an exception): the loader is ahead of the weights, so batches will be counted
            return None
        return loader.state_dict() if self._kept is None else self._kept

    def _source(self, loader: Loader, resumed: State | None) -> Iterator[Batch]:
        """An iterator over the rest of this epoch."""
        if resumed is None or not self.batch:
            if resumed is not None and resumed["random"] is not None:
                randomness.restore_random_state(resumed["random"])
            self._began = {
                "process": randomness.random_state(),
                "generators": [randomness.generator_state(one) for one in randomness.generators_of_reading(loader)],
                "workers_stayed": getattr(loader, "_iterator", None) is not None,
            }
            return timed(loader)
        return self._passed_over(loader, resumed)

    def _as_it_began(self) -> None:
        """New workers draw a seed before the sampler does; persistent ones had theirs from an earlier epoch."""
        if self._began is not None and self._began.get("workers_stayed"):
            randomness.restore_random_state(self._began["process"])

    def _passed_over(self, loader: Loader, resumed: State) -> Iterator[Batch]:
        def back() -> None:
            if resumed["random"] is not None:
                randomness.restore_random_state(resumed["random"])
            _restore(randomness.generators_of_samples(loader), resumed["generators"])

        if resumed["sampler"] is not None and hasattr(loader, "load_state_dict"):
            source = _from_state(loader, resumed["sampler"])
            back()
            return source
        if self._began is not None:
            randomness.restore_random_state(self._began["process"])
            _restore(randomness.generators_of_reading(loader), self._began["generators"])
        if _is_map_style(loader):
            loader._iterator = None  # persistent workers of an earlier reading, which hold the sampler as it was
            passing = _PassOver(loader.batch_sampler, self.batch, self._as_it_began, back)
            # DataLoader forbids it; the iterator made next takes it
            object.__setattr__(loader, "batch_sampler", passing)
            if loader.num_workers > 0:
                logger.warning("perfagent: %s", _IN_WORKERS)
            return timed(loader)
        source = timed(loader)
        before = randomness.random_state()
        seen = sum(1 for _ in itertools.islice(source, self.batch))
        if seen < self.batch and not self._estimated:
            raise ConfigError(f"the checkpoint was made after {self.batch} batches, and the loader has {seen}")
        if not randomness.is_same(before, randomness.random_state()):
            logger.warning("perfagent: %s", _OF_PROCESS)
        back()
        return source


_END = object()
_IN_WORKERS = (
    "the training continues within an epoch: the samples come in the same order, but what the loader's workers draw at random "
    "(augmentation) differs from an uninterrupted training"
)
_OF_PROCESS = (
    "the training continues within an epoch, and its loader draws random numbers from the process's generators: if they decide "
    "which samples come (a shuffle buffer), the rest of this epoch differs from an uninterrupted training. Give the loader a "
    "generator of its own, as an attribute"
)


def _restore(found: list[Any], states: list[Any]) -> None:
    if len(found) != len(states):
        logger.warning(
            "perfagent: the loader has %d random generators and had %d when the checkpoint was saved: the samples of the rest of "
            "this epoch differ from an uninterrupted training", len(found), len(states),
        )  # fmt: skip
        return
    randomness.restore_generators(found, states)


class _PassOver:
    """A batch sampler whose next round leaves out the batches that were seen; those after it are whole."""

    def __init__(self, inner: Any, number: int, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._inner, self._number, self._before, self._after = inner, number, before, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Batch]:
        number, self._number = self._number, 0
        if number:
            self._before()
        inner = iter(self._inner)
        for _ in itertools.islice(inner, number):
            pass
        if number:
            self._after()
        yield from inner


def _from_state(loader: Loader, state: Any) -> Iterator[Batch]:
    """An iterator from where a loader with a state of its own was."""
    loader.load_state_dict(state)
    try:
        return timed(loader)
    except AssertionError as error:  # torchdata's way of saying that its settings changed
        raise ConfigError("the loader's state wants the num_workers that it was saved with") from error


def _to(device: torch.device) -> Callable[[Batch], Batch]:
    """Moves a batch. To a GPU on a stream of its own: the copy runs beside what was queued before."""
    if device.type != "cuda":
        return lambda batch: moved(batch, device)
    stream = CopyStream(device)
    return lambda batch: stream.receive(stream.send(batch))


def length_of(loader: Loader) -> int | None:
    """Batches of an epoch, where the loader knows; not of an iterable dataset, whose length is a guess."""
    if isinstance(loader, DataLoader) and not _is_map_style(loader):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _is_map_style(loader: Loader) -> bool:
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, torch.utils.data.IterableDataset)
        and getattr(loader, "batch_sampler", None) is not None
    )
