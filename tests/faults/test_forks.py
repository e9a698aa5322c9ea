"""A14: forks with locks held, workers of every start method. A few here, a thousand of each in scripts/faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import job_environment, run_job, sync
from case_selection import everyday
from faults import loops
from faults.accounts import Accounts

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


WORKERS = """
import sys, torch
from torch.utils.data import DataLoader, Dataset
class Numbers(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.tensor([float(i)])
if __name__ == "__main__":
    import perfagent
    run = perfagent.init(run_id="workers")
    seen = 0.0
    for batch in DataLoader(Numbers(), batch_size=8, num_workers=1, multiprocessing_context=sys.argv[1]):
        seen += float(batch.sum())
        run.log({"seen": seen}, step=int(seen))
    print(seen)
"""


@pytest.mark.parametrize("method", everyday(1, ["fork", "spawn", "forkserver"]))
def test_a14_workers_of_a_loader_leave_the_agent_alone(fault: Accounts, tmp_path: Path, method: str) -> None:
    server = fault.server()
    assert run_job(WORKERS, tmp_path, server.url, method) == "2016.0\n"
    assert len({frame.source for frame in server.frames}) == 1
    assert len(server.values("seen")) == 8
    assert server.states()[-1] == "finished"
