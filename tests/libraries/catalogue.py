"""The libraries of the suite: what is trained with each, and what must be installed for it. This module is data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LIBRARIES", "Library"]


@dataclass(frozen=True, kw_only=True)
class Library:
    """One script, trainings/with_NAME.py.

    requirements: the first is the library itself, whose version is told. family: libraries that share a virtual environment.
    """

    name: str
    trained: str
    requirements: tuple[str, ...]
    family: str

    @property
    def package(self) -> str:
        return self.requirements[0]


def _library(family: str, name: str, trained: str, *requirements: str) -> Library:
    return Library(name=name, trained=trained, requirements=requirements, family=family)


TRAINERS = "trainers"

LIBRARIES = (
    _library(TRAINERS, "ignite", "trainer, evaluator, warm-up, checkpoints", "pytorch-ignite"),
    _library(TRAINERS, "fastai", "one cycle, its own optimizer, SaveModelCallback", "fastai"),
    _library(TRAINERS, "skorch", "fit and partial_fit, schedule, checkpoints", "skorch"),
    _library(TRAINERS, "poutyne", "fit_generator, several batches to a step, fit_dataset", "poutyne"),
)
