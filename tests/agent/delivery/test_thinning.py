from __future__ import annotations

import math

import pytest

from perfagent.delivery.columns import pack
from perfagent.delivery.thinning import events_only, nothing
from perfagent.wire import Event, Group


def group(name: str, *values: float) -> Group:
    steps = list(range(len(values)))
    return Group(step=steps, time=[1.0] * len(steps), monotonic=[1.0] * len(steps), values={name: pack(values)})


@pytest.mark.fault
def test_a05_without_samples_a_loss_or_gradient_that_is_not_finite_stays_beside_the_events() -> None:
    event = Event(kind="alert", time=1.0, data={})
    bad, worse = group("loss", 1.0, math.nan), group("grad/norm", math.inf)
    assert events_only([group("loss", 1.0), bad, group("lr", math.nan), worse], [event]) == ([bad, worse], [event])
    assert nothing([bad], [event]) == ([], [])
