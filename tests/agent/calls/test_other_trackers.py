"""Scripts of other trackers with one changed line: `import perfagent as wandb`, `as trackio`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from agent.scripts import run_script
from agent_recorded import Recording
from builders import job_environment

import perfagent

HERE = Path(__file__).parent
LEFT_OUT = {
    "Classes", "use_artifact()", "restore()", "Api", "summary['late']",
    "entity", "config_exclude_keys", "mode='offline'", "define_metric()", "Html", "plot", "Artifact", "log_artifact()", "save()",
    "run.dir", "wait_duration", "Image() has no argument 'mode'",
}  # fmt: skip


def train(script: str, folder: Path, **environment: str) -> list[str]:
    """What perfagent says."""
    environment = {"PERFAGENT_SERVER": "http://127.0.0.1:9", "PERFAGENT_RECORD": ""} | environment
    done = run_script(folder, HERE / script, "perfagent", str(folder), **environment)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("perfagent: ")]


@pytest.mark.real
def test_a_script_of_wandb_trains_and_says_once_what_is_lost(tmp_path: Path) -> None:
    said = [line for line in train("calls_of_wandb.py", tmp_path) if "no numbers" not in line]
    for left_out in LEFT_OUT:
        assert len([line for line in said if left_out in line]) == 1, (left_out, said)
    assert len(said) == len(LEFT_OUT), said
    recording = Recording(tmp_path / "perfagent-offline")
    assert recording.series("loss")[:3] == [(0, 0.5), (0, 1.0), (1, 0.5)], "of both runs"
    assert recording.series("val.accuracy") == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert (recording.series("early"), recording.series("late")) == ([(3, 1.5)], [(3, 2.5)])
    assert [value for name in ("summary/best", "summary/worst") for _, value in recording.series(name)] == [0.25, 1.0]
    media = {one["name"]: one for one in recording.events("media") if "name" in one}
    assert {name: one["what"] for name, one in media.items()} == {
        "image": "image", "images": "image", "table": "table", "histogram": "histogram", "sound": "audio",
    }  # fmt: skip
    assert json.loads(media["table"]["payload"]) == {
        "columns": ["word", "count", "half"],
        "rows": [["one", 1, 0.5], ["two", 2, 1.0]],
        "count": 2,
    }
    states = recording.events("state")
    assert {"first", "renamed"} <= {state.get("name") for state in states}
    assert ["a", "b", "train", "c", "d"] in [state.get("tags") for state in states]
    configs = [event["config"] for event in recording.events("context") if "config" in event]
    assert {"lr": 0.1, "depth": 3, "width": 8, "heads": 2, "early": 1}.items() <= max(configs, key=len).items()
    assert [alert["title"] for alert in recording.events("alert")] == ["slow"]


@pytest.mark.real
def test_a_script_of_trackio_trains(tmp_path: Path) -> None:
    said = train("calls_of_trackio.py", tmp_path, PERFAGENT_RECORD=str(tmp_path / "record"))
    assert [said for said in said if "init() has no argument" not in said] == []
    assert [line.split("'")[1] for line in said] == ["space_id", "webhook_url"]
    assert "perfagent has channels of the server" in said[1]
    recording = Recording(tmp_path / "record")
    assert [value for _, value in recording.series("loss")] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert {one["what"] for one in recording.events("media")} == {"image", "table", "histogram"}
    assert [value for _, value in recording.series("system/fan")] == [0.5]


@pytest.mark.real
@pytest.mark.parametrize("script", ["calls_of_wandb.py", "calls_of_trackio.py"])
def test_disabled_a_script_of_another_tracker_is_silent(script: str, tmp_path: Path) -> None:
    assert train(script, tmp_path, PERFAGENT_DISABLED="1") == []


@pytest.mark.long
@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_the_scripts_are_such_as_the_trackers_take(tracker: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed: scripts/install --all installs it")
    done = subprocess.run(
        [sys.executable, str(HERE / f"calls_of_{tracker}.py"), tracker, str(tmp_path)],
        env=job_environment(tmp_path), capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


# ---- perfagent's own names


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "offline"}, r"attach\(\) has no argument 'mode'; perfagent has record=FOLDER for mode=\"offline\""),
        ({"nmae": "x"}, r"attach\(\) has no argument 'nmae'; did you mean name=\?"),
        ({"zzz": 1}, r"attach\(\) has no argument 'zzz'; it takes model, optimizer, project"),
    ],
)
def test_attach_refuses_the_options_of_another_tracker(options: dict[str, object], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        perfagent.attach(**options)  # type: ignore[arg-type]


def test_names_of_other_trackers_are_there_and_not_offered() -> None:
    assert "watch" not in dir(perfagent) and callable(perfagent.watch)
    with pytest.raises(AttributeError, match="has no attribute 'wacth'; it has"):
        _ = perfagent.wacth


# ---- media


def test_a_table_takes_a_data_frame() -> None:
    class Frame:
        columns = ("a", "b")

        def itertuples(self, *, index: bool, name: None) -> list[tuple[int, str]]:
            return [(1, "x"), (2, "y")]

    told = json.loads(perfagent.Table(dataframe=Frame()).frozen().encoded())
    assert (told["columns"], told["rows"], told["count"]) == (["a", "b"], [[1, "x"], [2, "y"]], 2)
