"""The pieces of a training, which `perfagent tune` and `perfagent estimate` put together."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from perfagent.errors import ConfigError
from perfagent.session import inert
from perfagent_loop.checks import check_count, wanted_by
from perfagent_loop.kinds import Batch
from perfagent_loop.precision import Precision, checked_precision
from perfagent_loop.search.job_file import check_job_file
from perfagent_loop.strategies import device_of

__all__ = ["TuningJob", "checked_loss", "demo_job", "job_from"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningJob:
    """The parts of a training, for `perfagent.tune`, `perfagent tune FILE` and `perfagent estimate FILE`.

    Attributes:
        model: The model, on its device.
        optimizer: Its optimizer.
        dataset: A map-style dataset.
        loss: Computes the loss from the model and a batch that is on the model's device.
        batch_size: The batch size that the training uses now.
        num_workers: The number of workers that it uses now.
        precision: The precision that it uses now.
        collate: Makes a batch of samples; torch's own by default.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Dataset[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    batch_size: int = 32
    num_workers: int = 0
    precision: Precision = "fp32"
    collate: Callable[[list[Any]], Any] | None = None

    def __post_init__(self) -> None:
        for name, kind in (("model", nn.Module), ("optimizer", torch.optim.Optimizer)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} must be a torch {kind.__name__}, not {type(getattr(self, name)).__name__}")
        if not callable(self.loss):
            raise ConfigError("loss must be a function of the model and a batch that returns one number")
        if not (hasattr(self.dataset, "__len__") and hasattr(self.dataset, "__getitem__")) or not len(self.dataset):
            raise ConfigError("dataset must have a length, above 0, and items by index")
        check_count("batch_size", self.batch_size)
        check_count("num_workers", self.num_workers, least=0)
        checked_precision(self.precision)

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def with_loss(self) -> nn.Module:
        """The model and its loss as one module, which returns the loss of a batch."""
        return _WithLoss(self.model, self.loss)

    def loader(self, *, batch_size: int = 0, workers: int | None = None, pin: bool = False) -> DataLoader[Batch]:
        """A DataLoader of shuffled batches, all of the same size if there are enough samples for one."""
        size = batch_size or self.batch_size
        workers = self.num_workers if workers is None else workers
        drop_last = len(self.dataset) >= size  # type: ignore[arg-type]
        return DataLoader(
            self.dataset, size, shuffle=True, drop_last=drop_last, num_workers=workers, pin_memory=pin,
            collate_fn=self.collate,
        )  # fmt: skip

    def batch(self, size: int) -> Any:
        """A batch of the first samples. They repeat if the dataset has fewer."""
        collate: Any = self.loader(workers=0).collate_fn
        return collate([self.dataset[number % len(self.dataset)] for number in range(size)])  # type: ignore[arg-type]


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, batch: Batch) -> Tensor:
        return checked_loss(self._loss(self.model, batch))


def checked_loss(found: Any) -> Tensor:
    """What a job's loss returned. Raises ConfigError where nothing can be trained on it."""
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        without = " without a gradient" if isinstance(found, Tensor) and not found.requires_grad else ""
        raise ConfigError(f"loss(model, batch) returned {what}{without}; it must be one number that has a gradient")
    return found


def job_from(text: str) -> Any:
    """What the function `NAME` (by default `job`) of FILE.py returns, given as `FILE.py[:NAME]`: a TuningJob, or a
    mapping with its fields, which becomes one; anything else as it is. The file is run as a module, with its folder on
    the path; where it parses its arguments, it finds none, and so its defaults. No run begins meanwhile.

    Raises ConfigError for a file or function that is not there, and for a file that trains when imported.
    """
    path, _, name = text.partition(":")
    name = name or "job"
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"there is no file {path!r:.200}; give FILE.py:FUNCTION, whose function returns a TuningJob")
    check_job_file(file, name)
    spec = importlib.util.spec_from_file_location(f"perfagent_job_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path!r:.200} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # workers that are spawned, and pickle, look it up there
    sys.path.insert(0, str(file.resolve().parent))
    with _without_arguments(file), inert(f"{path} is read for its function {name}()"):
        spec.loader.exec_module(module)
        make = getattr(module, name, None)
        if not callable(make):
            raise ConfigError(f"{path}: {name} is a {type(make).__name__}, not a function that returns a TuningJob")
        if wanted_by(make):
            raise ConfigError(f"{path}:{name} is called without arguments, and needs some; give them defaults")
        made = make()
    if isinstance(made, Mapping) and "model" in made and "dataset" in made:
        known = [one.name for one in fields(TuningJob)]
        if strangers := sorted(set(made) - {*known}):
            raise ConfigError(f"{name} returns {', '.join(map(str, strangers))}; a TuningJob has {', '.join(known)}")
        if missing := sorted({"model", "optimizer", "dataset", "loss"} - set(made)):
            raise ConfigError(f"{name} returns no {', '.join(missing)}")
        return TuningJob(**made)
    return made


@contextlib.contextmanager
def _without_arguments(file: Path) -> Iterator[None]:
    """The words of the command line are the command's, and not the file's, which may have a parser of its own."""
    before, sys.argv = sys.argv, [str(file)]
    try:
        yield
    finally:
        sys.argv = before


def demo_job() -> TuningJob:
    """The training of `perfagent demo`: a GPT of half a million parameters over the bytes of Python's own sources."""
    file = importlib.util.find_spec("perfagent_tools.demo.tuning_job")
    job: TuningJob = job_from(file.origin or "" if file is not None else "")
    return job
