"""Runs whose gradients are measured in every step, or never again."""

from __future__ import annotations

import pytest


@pytest.fixture
def every_step(record):
    """every_step(model=None, optimizer=None): a run that measures the gradients of every step."""

    def start(model=None, optimizer=None):
        return record(model, optimizer=optimizer, overhead_budget_pct=1e9)

    return start


@pytest.fixture
def seldom(record):
    """A run that measures nothing after the first step: what it tells of later ones, clipping has computed."""

    def start(model=None, optimizer=None):
        recorded = record(model, optimizer=optimizer)
        recorded.run._progress.measure_at = 2**60
        return recorded

    return start
