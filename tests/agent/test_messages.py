"""What a job's own console says: of calls that cannot be meant so, of a run that ends for another, of what went
wrong."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest
from agent.scripts import run_script
from agent_recorded import Recording
from builders import free_port
from preloaded import Ended

import perfagent
from perfagent.process import variables
from perfagent_server.settings import Settings

pytestmark = pytest.mark.real


def ours(done: Ended) -> list[str]:
    return [line.removeprefix("perfagent: ") for line in done.stderr.splitlines() if line.startswith("perfagent: ")]


# ---- misuse

WRONG = """
import perfagent
first = perfagent.init("p", name="first")
for _ in range(2):
    perfagent.log("loss")
    perfagent.log(0.5)
    perfagent.log({1: 2})
    perfagent.log({"x": 1}, step=-1)
    perfagent.log({"x": 1}, step="three")
    perfagent.log({"x": 1}, step=5)
    perfagent.log({"x": 2}, step=3)
    perfagent.log({"other": 2}, step=4)
    perfagent.log({"n" * 300: 1})
    with first.phase("bad/name here"):
        pass
    with first.phase("my-phase.2"):
        pass
    first.alert("x", level="bad")
second = perfagent.init(name="second")
for _ in range(2):
    first.log({"x": 1})
    first.alert("late")
second.finish()
third = perfagent.init(name="third")
"""


SAID = (
    r"there is no setting PERFAGENT_PROT; did you mean PERFAGENT_PORT\?",
    r"there is no setting PERFAGENT_XYZZY; docs/reference/settings.md lists those that there are",
    r"log\(\) takes a dict of names and numbers, not 'loss'; left out\. Write log\(\{'loss': value\}\)",
    r"log\(\) takes a dict of names and numbers, not 0\.5; left out\.",
    r"the name 1 of log\(\) is stored as '1'; a name is printable text of 1 to 256 bytes",
    r"log\(step=\.\.\.\) takes a whole number from 0 to 2\*\*53, not -1; left out\.",
    r"log\(step=\.\.\.\) takes a whole number from 0 to 2\*\*53, not 'three'; left out\.",
    r"log\(step=3\) came after log\(step=5\) of the same name; the value is stored at step 3\.",
    r"phase\('bad/name here'\): a phase's name has letters, .*; its time is recorded as phase/bad_name_here_s",
    r"alert\(\) takes the level info, warning or critical, not 'bad'; it is a warning now",
    r"attach\(\) or init\(\) was called again with another name, .*: the run 'first' \(\w{12}\) is now finished",
    r"log\(\) was called after the end of the run 'first' \(\w{12}\); left out\.",
    r"alert\(\) was called after the end of the run 'first' \(\w{12}\); left out\.",
)


def test_each_misuse_is_said_once_and_what_can_be_is_stored(tmp_path: Path) -> None:
    done = run_script(tmp_path, WRONG, PERFAGENT_PROT="1", PERFAGENT_XYZZY="1", PERFAGENT_TEST_FOLDER=".")
    assert done.returncode == 0, done.stderr
    for said in SAID:
        assert len([line for line in ours(done) if re.match(said, line)]) == 1, f"{said}: {done.stderr}"
    assert len(ours(done)) == len(SAID), done.stderr
    recorded = Recording(tmp_path / "record")
    assert {step for step, _ in recorded.series("x")} >= {3, 5}
    assert recorded.series("other")
    assert {event["name"] for event in recorded.events("phase")} == {"bad_name_here", "my-phase.2"}


def test_disabled_every_call_is_silent(tmp_path: Path) -> None:
    body = "import perfagent\nperfagent.log({'x': 1})\n" + WRONG + "perfagent.finish()\nperfagent.log({'x': 1})\n"
    done = run_script(tmp_path, body, PERFAGENT_DISABLED="1", PERFAGENT_PROT="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_variable_that_is_read_is_a_known_name() -> None:
    assert {f"PERFAGENT_{name.upper()}" for name in Settings.__dataclass_fields__} <= variables.KNOWN
    root = Path(perfagent.__file__).parents[2]
    for package in ("agent", "server", "client", "dashboard"):
        for path in (root / package).rglob("*.py"):
            for name in re.findall(r"\"(PERFAGENT_[A-Z_]+)\"", path.read_text()):
                assert name in variables.KNOWN, f"{name} of {path}"
    assert variables.misspelt({"PERFAGENT_DISABELD": "1", "PATH": ""}) == [
        "there is no setting PERFAGENT_DISABELD; did you mean PERFAGENT_DISABLED?"
    ]


# ---- calls of other trackers


def test_config_and_run_are_those_of_the_current_run(tmp_path: Path) -> None:
    """Of a script that says `import perfagent as wandb` (tests/agent/calls)."""
    with pytest.raises(AttributeError, match="there is none: call attach"):
        _ = perfagent.config
    with perfagent.init("p", config={"lr": 0.1}, record=tmp_path / "record") as run:
        assert perfagent.run is run and perfagent.config is run.config
        with pytest.raises(AttributeError, match="has no 'width'; it has lr"):
            _ = perfagent.config.width
        assert copy.deepcopy(perfagent.config) == pickle.loads(pickle.dumps(perfagent.config)) == {"lr": 0.1}
    assert perfagent.run is None


# ---- what went wrong

TRAINING = """
import os, sys, torch, perfagent
from torch.utils.data import DataLoader, TensorDataset
x = torch.randn(64, 4)
if "nan" in sys.argv:
    x[40] = float("nan")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
perfagent.attach(model, optimizer, run_id="job")
for batch, target in DataLoader(TensorDataset(x, torch.randn(64, 1)), batch_size=4):
    loss = ((model(batch) - target) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if "fork" in sys.argv and not os.fork():
    raise ValueError("in a child")
if "crash" in sys.argv:
    raise ValueError("bad batch")
if "oom" in sys.argv:
    torch.empty(2**50)
if "interrupt" in sys.argv:
    raise KeyboardInterrupt
"""
NAN = r"the loss is NaN(?: or infinite)? in step 11\. Cause: batch \('batch'\)\."


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nan", "crash"], [NAN, r"the job crashed after step 16\. ValueError: bad batch\."]),
        (["oom"], [r"out of cpu memory in step 17: 4,294,967,296 MiB could not be allocated\."]),
        (["fork"], []),
        (["interrupt"], []),
    ],
    ids=lambda value: "-".join(value) if value and isinstance(value[0], str) and value[0].isalpha() else "",
)
def test_nan_full_memory_and_crash_are_a_line_with_cause_each(
    tmp_path: Path, words: list[str], expected: list[str]
) -> None:
    done = run_script(tmp_path, TRAINING, *words)
    said = ours(done)
    assert len(said) == len(expected), done.stderr
    for line, pattern in zip(said, expected, strict=True):
        assert re.match(pattern, line)
        assert line.endswith(f"Recorded in {tmp_path / 'record'}; `perfagent sync {tmp_path / 'record'}` sends it")
    if expected:
        assert done.stderr.splitlines()[-1] == f"perfagent: {said[-1]}", "after the traceback"


def test_line_has_the_address_of_the_run(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = run_script(tmp_path, TRAINING, "nan", PERFAGENT_RECORD="", PERFAGENT_SERVER=url)
    (nan,) = [line for line in ours(done) if line.startswith("the loss")]
    assert nan.endswith(f"See {url}/run/job")
    assert run_script(tmp_path, TRAINING, "nan", "crash", PERFAGENT_DISABLED="1").stderr.count("perfagent:") == 0
