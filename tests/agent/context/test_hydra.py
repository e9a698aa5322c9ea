"""A script of Hydra's, with the real one: what it is configured with is told as it is written."""

from __future__ import annotations

from pathlib import Path

import preloaded
import pytest
from agent_recorded import Recording
from builders import job_environment

pytestmark = pytest.mark.real

SECRET = "hf_abcdefghijklmnopqrstuvwxyzABCD"
CONFIG = f"""
optimizer:
  lr: 0.1
  again: ${{optimizer.lr}}
later: ???
from_a_variable: ${{oc.env:NOT_SET_ANYWHERE}}
hub_token: {SECRET}
"""
SCRIPT = """
import hydra, os, perfagent, torch

@hydra.main(config_path=".", config_name="config", version_base=None)
def main(cfg):
    perfagent.init(config=cfg) if "GIVEN" in os.environ else perfagent.init()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.optimizer.lr)
    for _ in range(3):
        model(torch.ones(4, 2)).mean().backward()
        optimizer.step()

main()
"""


def test_a_configuration_is_told_as_written_without_secrets(tmp_path: Path) -> None:
    """Found by itself, or given to init()."""
    (tmp_path / "config.yaml").write_text(CONFIG, "utf-8")
    (tmp_path / "train.py").write_text(SCRIPT, "utf-8")
    environments = [
        job_environment(tmp_path, PERFAGENT_RECORD=str(tmp_path / name), **more)
        for name, more in (("alone", {}), ("given", {"GIVEN": "1"}))
    ]
    ended = preloaded.run(["train.py", "optimizer.lr=0.25"], tmp_path, environments)
    assert [done.returncode for done in ended] == [0, 0], ended
    (given,) = [one["config"] for one in Recording(tmp_path / "given").events("state") if one.get("config")]
    told = Recording(tmp_path / "alone").events("context")
    found = next(event["config"]["hydra"] for event in told if "hydra" in event.get("config", {}))
    for config in (given, found):
        assert config["optimizer"] == {"lr": 0.25, "again": "${optimizer.lr}"}
        assert (config["later"], config["from_a_variable"]) == ("???", "${oc.env:NOT_SET_ANYWHERE}")
        assert SECRET not in str(config)
    for name in ("alone", "given"):
        assert all(SECRET.encode() not in file.read_bytes() for file in (tmp_path / name).rglob("*") if file.is_file())
