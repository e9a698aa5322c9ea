"""multiprocessing.Pool, which ends its workers by SIGTERM as soon as the results are there."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent.scripts import run_script
from agent_recorded import recorded

TRAINS_IN_A_POOL = """
import sys, torch, torch.multiprocessing as for_tensors, multiprocessing as plain

def train(k):
    import perfagent
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    perfagent.attach(model, optimizer, name=f"trial-{k}")
    for _ in range(5 + k):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return 1 // k

if __name__ == "__main__":
    module = for_tensors if sys.argv[2] == "tensors" else plain
    with module.get_context(sys.argv[1]).Pool(1) as pool:
        results = [pool.apply_async(train, (k,)) for k in range(3)]
        for result in results:
            result.wait()
        print([result.successful() for result in results])
"""


@pytest.mark.real
@pytest.mark.parametrize(
    ("method", "module"), [("fork", "plain"), pytest.param("spawn", "tensors", marks=pytest.mark.long)]
)
def test_a_training_in_a_pool_ends_with_its_task(tmp_path: Path, method: str, module: str) -> None:
    done = run_script(tmp_path, TRAINS_IN_A_POOL, method, module)
    assert done.stdout == "[False, True, True]\n", done.stderr
    ends = sorted((len(one.series["loss"]), one.states[-1]["state"]) for one in recorded(tmp_path / "record"))
    assert ends == [(5, "failed"), (6, "finished"), (7, "finished")]
