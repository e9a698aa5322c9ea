"""A compiled model that is fed nine lengths: from the script to the finding, by all rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_recorded import Recording
from builders import job_environment
from judging import fired, make_evaluator
from preloaded import run

from perfagent_server.store.codec.tail import TailGroup
from perfagent_server.store.stored import FromTail

JOB = """
import perfagent, torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(10, 8), nn.Linear(8, 8)

    def forward(self, tokens):
        return self.linear(self.embedding(tokens)).square().mean()

model = Model()
run = perfagent.attach(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model, backend="aot_eager", dynamic=False)
for length in (*range(3, 14), *range(3, 14)):
    optimizer.zero_grad()
    compiled(torch.arange(2 * length).reshape(2, length) % 10).backward()
    optimizer.step()
run.finish()
"""


@pytest.mark.long
def test_nine_lengths_are_told_with_the_reason_and_what_to_do(tmp_path: Path) -> None:
    environment = job_environment(tmp_path, PERFAGENT_RECORD=str(tmp_path / "record"))
    (tmp_path / "job.py").write_text(JOB)
    [done] = run([str(tmp_path / "job.py")], tmp_path, [environment])
    assert done.returncode == 0, done
    evaluator = make_evaluator()
    changes = []
    for number, (groups, events) in enumerate(Recording(tmp_path / "record").frames(), 1):
        last = max((group.times()[-1] for group in groups), default=evaluator.window.now)
        tail = [TailGroup.of_group(group) for group in groups]
        changes += evaluator.take(FromTail(number, "r", 1, 0, "s", number, last, tail, list(events)))
    [finding] = [change.finding for change in fired(changes, "recompiles")]
    assert finding.severity == "warning"
    assert "8 times for 9 lengths of dimension 1 of `tokens`" in finding.message
    assert "limit of 8" in finding.message
    assert "mark_dynamic" in finding.fix
    assert evaluator.verdict().rule == "recompiles"
