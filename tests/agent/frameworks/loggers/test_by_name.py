"""perfagent by the names under which trainers know a logger: each value once, at its step, and the training the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from agent.frameworks.running import logged_once, trained
from agent_recorded import Recording
from builders import job_environment

import perfagent

SCRIPT = Path(__file__).with_name("scripts") / "by_name.py"
pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    "which",
    ["transformers", "lightning", "accelerate"]
    + [
        pytest.param(which, marks=pytest.mark.long)
        for which in ("transformers_uncaptured", "lightning_callback", "accelerate_object", "deepspeed")
    ],
)
def test_a_logger_by_name_has_each_value_once_at_its_step(which: str) -> None:
    recording, _ = logged_once(trained(SCRIPT, which))
    assert len({step for step, _ in recording.series("loss")}) == len(recording.series("loss")) >= 6
    states = recording.events("state")
    assert {state["name"] for state in states if state.get("name")} == {"by name"}
    assert [state["state"] for state in states if state["state"] in ("finished", "failed")] == ["finished"]
    images = [one["name"] for one in recording.events("media") if "name" in one]
    assert images == (["image"] if which.startswith("accelerate") else [])


def test_settings_that_a_module_gives_its_logger_are_once_there() -> None:
    configs = [
        event["config"]
        for event in Recording(trained(SCRIPT, "lightning") / "record").events("context")
        if "config" in event
    ]
    assert configs[-1]["lightning"] == {"depth": 3, "seen": 1} and "depth" not in configs[-1]


@pytest.mark.parametrize(
    "first", ["perfagent", *(pytest.param(first, marks=pytest.mark.long) for first in ("transformers", "accelerate"))]
)
def test_the_name_is_known_whichever_is_imported_first(first: str, tmp_path: Path) -> None:
    code = (
        f"import {first}, perfagent, sys; from transformers.integrations import integration_utils as one\n"
        "from accelerate import tracking as two; from perfagent import integrations as ours\n"
        "print(one.INTEGRATION_TO_CALLBACK['perfagent'] is ours.PerfagentCallback)\n"
        "print(two.LOGGER_TYPE_TO_CLASS['perfagent'] is ours.PerfagentTracker)\n"
        "print([finder for finder in sys.meta_path if 'perfagent' in repr(finder)], perfagent.run)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=job_environment(tmp_path), capture_output=True, text=True)
    assert done.stdout.split("\n")[:3] == ["True", "True", "[] None"], done.stderr


def test_a_class_without_its_library_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import perfagent.integrations\n"
        "try: perfagent.integrations.PerfagentCallback\n"
        "except perfagent.integrations.ResourceError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=job_environment(tmp_path), capture_output=True, text=True)
    assert done.stdout.endswith("pip install transformers\n"), done.stderr


def test_a_run_of_the_script_keeps_its_name_and_place(tmp_path: Path) -> None:
    from perfagent.session import join

    run = perfagent.attach(name="mine", project="p", record=tmp_path / "record")
    assert join(name="of the trainer", project="other") is run
    assert (run.name, run.project) == ("mine", "p")
    run.finish()
