"""An environment keeps what it has: pip adds perfagent alone, and the agent runs on the oldest packages that it allows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from agent_recorded import Recording

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, perfagent
run = perfagent.init(record=sys.argv[1])
for step in range(1, 4):
    perfagent.log({"loss": 1 / step}, step=step)
perfagent.finish()
"""


@pytest.mark.long
def test_oldest_allowed_packages_stay_and_the_agent_records(tmp_path: Path) -> None:
    bounds = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    oldest = [re.sub(r">=([0-9.]+).*", r"==\1.*", bound) for bound in bounds]
    assert len(oldest) == 4
    wheels, environment = tmp_path / "wheels", tmp_path / "environment"
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(ROOT))
    (wheel,) = map(str, wheels.iterdir())
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = str(environment / "bin" / "python")
    pip(python, "install", *oldest)

    report = json.loads(pip(python, "install", "--dry-run", "--report", "-", wheel))
    assert [package["metadata"]["name"] for package in report["install"]] == ["perfagent"]

    pip(python, "install", wheel)
    subprocess.run([python, "-c", SCRIPT, tmp_path / "record"], check=True, timeout=120, cwd=tmp_path)
    assert Recording(tmp_path / "record").series("loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]


def pip(python: str, *arguments: str) -> str:
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
