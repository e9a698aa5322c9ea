"""A script of Hydra's, with the real one: what it is configured with is told as it is written, and each job is a
run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    run = perfagent.init(config=cfg) if "GIVEN" in os.environ else perfagent.init()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.optimizer.lr)
    for _ in range(3):
        model(torch.ones(4, 2)).mean().backward()
        optimizer.step()
    print("run", run.id)

main()
"""


def ran(folder: Path, *overrides: str, **records: dict[str, str]) -> list[list[str]]:
    """The ids of the runs of each process. records: the variables of each, by where it records."""
    (folder / "config.yaml").write_text(CONFIG, "utf-8")
    (folder / "train.py").write_text(SCRIPT, "utf-8")
    environments = [
        job_environment(folder, PERFAGENT_RECORD=str(folder / name), **more) for name, more in records.items()
    ]
    ended = preloaded.run(["train.py", *overrides], folder, environments)
    assert [done.returncode for done in ended] == [0] * len(records), ended
    return [[line.split()[1] for line in done.stdout.splitlines() if line.startswith("run ")] for done in ended]


def found(recorded: Recording) -> list[dict[str, Any]]:
    """The configurations that were found by themselves."""
    return [event["config"]["hydra"] for event in recorded.events("context") if "hydra" in event.get("config", {})]


def test_a_configuration_is_told_as_written_without_secrets(tmp_path: Path) -> None:
    """Found by itself, or given to init()."""
    ran(tmp_path, "optimizer.lr=0.25", alone={}, given={"GIVEN": "1"})
    (given,) = [one["config"] for one in Recording(tmp_path / "given").events("state") if one.get("config")]
    for config in (given, found(Recording(tmp_path / "alone"))[0]):
        assert config["optimizer"] == {"lr": 0.25, "again": "${optimizer.lr}"}
        assert (config["later"], config["from_a_variable"]) == ("???", "${oc.env:NOT_SET_ANYWHERE}")
        assert SECRET not in str(config)
    for name in ("alone", "given"):
        assert all(SECRET.encode() not in file.read_bytes() for file in (tmp_path / name).rglob("*") if file.is_file())


def test_each_job_of_a_multirun_is_a_run_with_what_it_was_given(tmp_path: Path) -> None:
    (runs,) = ran(tmp_path, "--multirun", "optimizer.lr=0.1,0.2,0.3", record={})
    assert len(set(runs)) == 3
    assert {config["optimizer"]["lr"] for config in found(Recording(tmp_path / "record"))} == {0.1, 0.2, 0.3}
