"""The trainings of the quickstart that name perfagent as their logger run as they are printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_recorded import Recording
from builders import job_environment
from documents import ROOT, Document
from preloaded import run

pytestmark = pytest.mark.real
QUICKSTART = Document(ROOT / "docs" / "quickstart.md", (ROOT / "docs" / "quickstart.md").read_text("utf-8"))
BEFORE = """
import torch, warnings
warnings.simplefilter("ignore")
torch.manual_seed(0)
loader = torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=4)
"""
TRANSFORMERS = """
class Model(torch.nn.Linear):
    def forward(self, x, labels=None):
        return {"loss": (super().forward(x) - labels).square().mean()}
model = Model(4, 1)
dataset = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(24)]
"""
LIGHTNING = """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        loss = self.model(batch).square().mean()
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
module = Module()
"""
ACCELERATE = """
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
STEPS = """
for step, batch in enumerate(loader, 1):
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"train_loss": loss.item()}, step=step)
accelerator.end_training()
"""


@pytest.mark.parametrize(
    ("names", "before", "after", "logged"),
    [
        ('report_to="perfagent"', TRANSFORMERS, "", "train/train_loss"),
        ("PerfagentLogger(", LIGHTNING, "", "train_loss"),
        ('log_with="perfagent"', ACCELERATE, STEPS, "train_loss"),
    ],
    ids=["transformers", "lightning", "accelerate"],
)
def test_a_training_of_the_quickstart_is_a_run(
    names: str, before: str, after: str, logged: str, tmp_path: Path
) -> None:
    [block] = [piece.text for piece in QUICKSTART.code() if piece.language == "python" and names in piece.text]
    assert len([line for line in block.splitlines() if line.strip()]) <= 5
    script = tmp_path / "script.py"
    script.write_text(BEFORE + before + block + after)
    environment = {"PERFAGENT_RECORD": str(tmp_path / "record"), "ACCELERATE_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}
    [done] = run([str(script)], tmp_path, [job_environment(tmp_path, **environment)])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "perfagent:" not in done.stderr
    recording = Recording(tmp_path / "record")
    assert [name for state in recording.events("state") if (name := state.get("name"))][-1] == "first try"
    assert len(recording.series("loss")) >= 3 and recording.series(logged)
    assert recording.events("state")[-1]["state"] == "finished"
