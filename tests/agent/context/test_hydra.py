"""A script of Hydra's, with the real one: what it is configured with is told as it is written, and each job is a
run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import preloaded
import pytest
from agent_recorded import Recording
from builders import job_environment

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
import hydra, perfagent, torch

@hydra.main(config_path=".", config_name="config", version_base=None)
def main(cfg):
    run = perfagent.init(GIVEN)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.optimizer.lr)
    for _ in range(3):
        model(torch.ones(4, 2)).mean().backward()
        optimizer.step()
    print("run", run.id)

main()
"""


def ran(folder: Path, *overrides: str, given: str = "") -> list[str]:
    """The ids of its runs. given: the argument of `init`."""
    (folder / "config.yaml").write_text(CONFIG, "utf-8")
    (folder / "train.py").write_text(SCRIPT.replace("GIVEN", given), "utf-8")
    environment = job_environment(folder, PERFAGENT_RECORD=str(folder / "record"))
    [done] = preloaded.run(["train.py", *overrides], folder, [environment])
    assert done.returncode == 0, done.stderr
    return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("run ")]


def found(recorded: Recording) -> list[dict[str, Any]]:
    """The configurations that were found by themselves."""
    return [event["config"]["hydra"] for event in recorded.events("context") if "hydra" in event.get("config", {})]


@pytest.mark.parametrize("given", ["", "config=cfg"], ids=["found by itself", "given to init"])
def test_the_configuration_is_told_as_it_is_written_without_its_secrets(tmp_path: Path, given: str) -> None:
    ran(tmp_path, "optimizer.lr=0.25", given=given)
    recorded = Recording(tmp_path / "record")
    if given:
        (config,) = [event["config"] for event in recorded.events("state") if event.get("config")]
    else:
        config = found(recorded)[0]
    assert config["optimizer"] == {"lr": 0.25, "again": "${optimizer.lr}"}
    assert (config["later"], config["from_a_variable"]) == ("???", "${oc.env:NOT_SET_ANYWHERE}")
    assert SECRET not in str(config)
    assert all(SECRET.encode() not in file.read_bytes() for file in (tmp_path / "record").rglob("*") if file.is_file())


def test_each_job_of_a_multirun_is_a_run_with_what_it_was_given(tmp_path: Path) -> None:
    runs = ran(tmp_path, "--multirun", "optimizer.lr=0.1,0.2,0.3")
    assert len(set(runs)) == 3
    assert {config["optimizer"]["lr"] for config in found(Recording(tmp_path / "record"))} == {0.1, 0.2, 0.3}
