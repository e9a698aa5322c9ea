"""A14: forks with locks held, workers of every start method. A few here, a thousand of each in scripts/faults."""

from __future__ import annotations

import pytest
from builders import job_environment, sync
from case_selection import everyday
from faults import loops

pytestmark = [pytest.mark.fault, pytest.mark.real]


@pytest.mark.parametrize(
    ("method", "count"), everyday(2, [("os", 100), ("forkserver", 10), ("fork", 20), ("spawn", 4)])
)
def test_a14_children_never_hang_and_leave_the_agent_alone(fault, tmp_path, method, count):
    server = fault.server()
    variables = job_environment(tmp_path, PERFAGENT_SERVER=server.url)
    good, said = loops.forks(method, count, variables)
    assert good == count, said
    sync(variables)
    assert not any("child" in group.values for frame in server.frames for group in frame.groups)
    assert "from a child" not in [alert.get("title") for alert in server.events("alert")]
    assert len({frame.source for frame in server.frames}) == 1
    assert server.states()[-1] == "finished"
    assert server.samples("last") == [1.0]
