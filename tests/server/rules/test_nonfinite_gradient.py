"""Rules on the gradients."""

from __future__ import annotations

import math

from judging import judge_series

from perfagent_server.rules.model.nonfinite_gradient import NonfiniteGradient


def test_an_alert_on_two_series_is_over_after_as_many_sound_steps_as_any_other() -> None:
    """A step that both series tell of is one step."""
    bad = 10
    norms = [math.nan if step == bad else 1.0 for step in range(1, 201)]
    counts = [3.0 if step == bad else 0.0 for step in range(1, 201)]
    changes, _ = judge_series({"grad/norm": norms, "grad/nonfinite": counts}, rows=5, rules=[NonfiniteGradient()])
    assert [change.kind for change in changes] == ["fire", "resolve"]
    assert changes[1].step == bad + NonfiniteGradient.life.clear_steps
