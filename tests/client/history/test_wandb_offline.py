"""Runs that W&B wrote offline, equal to what its own reader finds; and cut or damaged at any byte."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfagent.wire.quantities import some
from perfagent_client.history import OldRun, find_runs

FIXTURES = Path(__file__).parents[2] / "data" / "history"
FORMAT = "wandb"
VERSIONS = ("wandb-0.15", "wandb-0.19", "wandb-0.31")
each_version = pytest.mark.parametrize("version", VERSIONS)


def runs(path: Path) -> dict[str, OldRun]:
    return {run.source: run for source in find_runs([path]) if source.format == FORMAT for run in source.read()}


def of_version(version: str, name: str) -> tuple[OldRun, list[dict[str, Any]]]:
    """The run, and what W&B's own reader found in its logs."""
    truth = json.loads((FIXTURES / "wandb-truth" / f"{version}.json").read_text())
    logs = [found for log, found in sorted(truth.items()) if log.endswith(f"/run-{name}.wandb")]
    return runs(FIXTURES / version)[f"wandb:fixtures/{name}"], logs


def numbers(logs: list[dict[str, Any]]) -> dict[str, list[list[object]]]:
    """Series of W&B's rows: their JSON as Python reads it."""
    found: dict[str, list[list[object]]] = {}
    following = 0
    for step, row in (row for log in logs for row in log["rows"]):
        step = int(row.get("_step", following if step is None else step))
        following = step + 1
        media = tuple(name.removesuffix("_type") for name in row if name.endswith("._type"))
        for name, text in ((name, text) for name, text in row.items() if not name.startswith(media)):
            for path, value in parts(name, json.loads(text, parse_int=float)):
                if isinstance(value, bool | float) and not path.startswith("_"):
                    found.setdefault(path, []).append(
                        [step, json.loads(row.get("_timestamp", "NaN")).hex(), float(value).hex()]
                    )
    return found


def parts(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and "_type" not in value:
        return [part for key, inner in value.items() for part in parts(f"{name}.{key}", inner)]
    return [(name, value)]


def exact(run: OldRun) -> dict[str, list[list[object]]]:
    return {
        name: [[s, t.hex(), v.hex()] for s, t, v in zip(series.step, series.time, series.value, strict=True)]
        for name, series in run.series.items()
        if not name.startswith("system.")
    }


@each_version
@pytest.mark.parametrize("name", ["whole", "again", "failed", "killed"])
def test_series_equal_those_of_its_own_reader(version, name):
    run, logs = of_version(version, name)
    assert exact(run) == numbers(logs)
    assert run.points > 0


@each_version
@pytest.mark.parametrize(("name", "state"), [("whole", "finished"), ("again", "finished"), ("failed", "failed")])
def test_exit_codes_are_states(version, name, state):
    run, _ = of_version(version, name)
    assert run.state == state
    assert run.ended >= run.started


def test_a_killed_run_has_no_state_and_no_end():
    run, _ = of_version("wandb-0.19", "killed")
    assert (run.state, run.ended) == ("", None)
    assert 200 < run.points < 300
    assert [said.endswith("bytes of run-killed.wandb are cut") for said in run.left_out] == [True]


@each_version
def test_a_run_keeps_name_group_tags_notes_and_settings(version):
    run, (log,) = of_version(version, "whole")
    assert (run.name, run.project, run.group, run.notes) == ("baseline", "fixtures", "ablation", "two\nlines")
    assert sorted(run.tags) == ["a", "b"]
    assert run.started == float.fromhex(log["run"]["started"])
    model = {"name": "small", "dropout": None}
    assert run.config == {"lr": 0.2, "layers": [64, 32], "model": model, "model/size": 7}
    assert run.meta["job_type"] == "train"
    assert run.meta["summary"]["best"] == 0.75
    assert "a line of the console" in run.console
    assert "another" in run.console


@each_version
def test_what_is_no_number_is_counted(version):
    run, _ = of_version(version, "whole")
    assert run.left_out == ["values that are no numbers: 1 histogram, 1 html-file, 1 list, 1 null, 12 texts"]


def test_a_resumed_run_is_one_run():
    run, logs = of_version("wandb-0.19", "again")
    assert len(logs) == 2
    assert [*run.series["loss"].step] == [0, 1, 2, 3, 3, 4, 5, 6]


AXES = {
    "transformers": dict.fromkeys(("train/loss", "train/epoch", "eval/loss", "mine"), "train/global_step"),
    "lightning": {"loss": "trainer/global_step"},
    "axes": dict.fromkeys(("train/loss", "train/other", "train/accuracy"), "train/step"),
    "rare": {"loss": "_step", "val/loss": "global_step"},
}
"""Run -> series -> what W&B's charts of it have for the step; accuracy's is the epoch, but its rows have the step, too."""


@pytest.mark.parametrize("name", AXES)
def test_steps_are_those_of_the_axis_that_wandb_draws(name):
    run, logs = of_version("wandb-axes", name)
    rows = [row for log in logs for _, row in log["rows"]]
    for series, axis in AXES[name].items():
        wanted = [(int(row[axis]), float(row[series])) for row in rows if series in row]
        assert [*zip(run.series[series].step, run.series[series].value, strict=True)] == wanted and wanted
    assert {one for found in run.series.values() for one in found.step} <= {
        int(row[one]) for row in rows for one in row if "step" in one
    }


def test_series_without_the_axis_get_its_newest_step():
    run, _ = of_version("wandb-axes", "axes")
    assert [*run.series["val/loss"].step] == [*run.series["val/f1"].step] == [3, 9, 15]
    assert [*run.series["before"].step] == [0]
    run, _ = of_version("wandb-axes", "lightning")
    assert [*run.series["loss"].step] == [0, 10, 20, 30, 40, 30, 40, 50, 60, 70], "the second log goes back"
    assert run.left_out == []


def test_an_axis_that_is_no_whole_number_is_none(file):
    def of(axis: bytes) -> bytes:
        items = {b"global_step": axis, b"loss": b"0.5"}
        return field(2, b"".join(field(1, field(2, name) + field(16, text)) for name, text in items.items()))

    for odd in (b"1.5", b"NaN", b"-1", b"1e300"):
        file.write_bytes(log_of([of(b"10"), of(b"20"), of(odd)]))
        (run,) = runs(file).values()
        assert [*run.series["loss"].step] == [10, 20, 20]


def test_a_run_folder_or_a_log_alone_is_found(tmp_path):
    log = next((FIXTURES / "wandb-0.19").rglob("run-failed.wandb"))
    assert list(runs(log)) == list(runs(log.parent)) == ["wandb:fixtures/failed"]


def test_settings_and_output_beside_a_damaged_log_are_read(tmp_path):
    (log,) = (FIXTURES / "wandb-0.19").rglob("run-failed.wandb")
    folder = tmp_path / log.parent.name
    (folder / "files").mkdir(parents=True)
    (folder / log.name).write_bytes(log.read_bytes()[:7])
    (folder / "files" / "config.yaml").write_text("_wandb: {value: {}}\nlr: {value: 0.5}\n")
    (folder / "files" / "output.log").write_text("step 1\nstep 2\n")
    (run,) = runs(tmp_path).values()
    assert (run.source, run.config, run.console) == ("wandb:/failed", {"lr": 0.5}, ["step 1", "step 2"])


def test_the_machine_and_the_program_are_kept():
    run, _ = of_version("wandb-0.31", "again")
    assert (run.meta["host"], run.meta["program"], run.meta["args"]) == ("node-7", "train.py", ["--lr", "0.1"])
    assert run.series["system.proc.cpu.threads"].value[0] > 0


def test_metadata_beside_an_older_log_are_kept(tmp_path):
    (log,) = (FIXTURES / "wandb-0.19").rglob("run-failed.wandb")
    (tmp_path / "files").mkdir()
    (tmp_path / log.name).write_bytes(log.read_bytes())
    metadata = {"host": "node-7", "gpu": "NVIDIA H200", "git": {"commit": "c0ffee"}, "email": "a@b.c"}
    (tmp_path / "files" / "wandb-metadata.json").write_text(json.dumps(metadata))
    (run,) = runs(tmp_path).values()
    assert run.meta == {"host": "node-7", "gpu": "NVIDIA H200", "git": {"commit": "c0ffee"}, "summary": {"loss": 1}}


def varint(value: int) -> bytes:
    return (bytes((value & 127 | 128,)) + varint(value >> 7)) if value > 127 else bytes((value,))


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def row(step: int) -> bytes:
    items = {b"_step": b"%d" % step, b"loss": json.dumps(step / 8).encode(), b"note": b'"' + b"x" * (step * 600) + b'"'}
    return field(2, b"".join(field(1, field(2, name) + field(16, text)) for name, text in items.items()))


def log_of(records: list[bytes]) -> bytes:
    """As LevelDB writes: chunks that fit into blocks of 32 KiB."""
    data = bytearray(b":W&B\xe1\xbe\x00")
    for record in records:
        first = True
        while first or record:
            room = 32_768 - len(data) % 32_768
            if room < 7:
                data += bytes(room)
                room = 32_768
            part, record = record[: room - 7], record[room - 7 :]
            kind = bytes(((1 if first else 4) if not record else (2 if first else 3),))
            data += struct.pack("<IH", zlib.crc32(kind + part), len(part)) + kind + part
            first = False
    return bytes(data)


ROWS = [row(step) for step in range(20)]
LOG = log_of(ROWS)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs") / "run-one.wandb"


def read(file: Path, data: bytes) -> tuple[set[tuple[int, float]], list[str]]:
    file.write_bytes(data)
    (run,) = runs(file).values()
    loss = run.series.get("loss")
    return set(zip(loss.step, loss.value, strict=True)) if loss else set(), run.left_out


@settings(max_examples=50, deadline=None)
@given(st.integers(7, len(LOG) - 1))
def test_a_cut_log_is_read_as_far_as_it_is_whole(file, cut):
    found, left_out = read(file, LOG[:cut])
    whole = next(count for count in range(20, -1, -1) if len(log_of(ROWS[:count])) <= cut)
    assert found == {(step, step / 8) for step in range(whole)}
    rest = LOG[len(log_of(ROWS[:whole])) : cut]
    said = [f"the last {some(len(rest), 'byte')} of {file.name} are cut"] if rest.strip(b"\0") else []
    assert [one for one in left_out if "cut" in one] == said


@settings(max_examples=50, deadline=None)
@given(st.integers(0, len(LOG) - 1), st.integers(1, 255))
def test_a_damaged_byte_changes_no_value(file, at, change):
    data = bytearray(LOG)
    data[at] ^= change
    found, left_out = read(file, bytes(data))
    assert found <= {(step, step / 8) for step in range(20)}
    assert any("damaged" in said or "cut" in said or "begins" in said for said in left_out)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_in_a_log_are_no_crash(file, data):
    for record in (
        data,
        field(2, data),
        field(2, field(1, data)),
        field(17, data),
        field(7, data),
        field(5, field(1, data)),
    ):
        read(file, log_of([record]))
    read(file, LOG[:7] + data)


def test_rows_without_a_step_are_counted_from_the_first_one(file):
    bare = field(2, field(1, field(2, b"loss") + field(16, b"0.5")))
    begins_at_5 = field(17, field(1, b"one") + varint(14 << 3) + varint(5))
    step_9 = field(2, field(1, field(1, b"loss") + field(16, b"1.5")) + field(2, varint(1 << 3) + varint(9)))
    file.write_bytes(log_of([begins_at_5, bare, bare, step_9, bare]))
    (run,) = runs(file).values()
    assert [*run.series["loss"].step] == [5, 6, 9, 10]


def test_an_id_used_in_two_projects_is_two_runs(tmp_path):
    for number, project in enumerate([b"first", b"second"]):
        folder = tmp_path / f"run-2025010{number}_000000-one"
        folder.mkdir()
        (folder / "run-one.wandb").write_bytes(log_of([field(17, field(1, b"one") + field(3, project)), row(number)]))
    assert [(source, [*run.series["loss"].step]) for source, run in runs(tmp_path).items()] == [
        ("wandb:first/one", [0]),
        ("wandb:second/one", [1]),
    ]


def test_a_block_that_ends_with_the_file_is_read(file):
    room = 32_768 - len(log_of([row(1)])) - 7
    data = log_of([row(1), field(13, field(3, b"x" * (room - 8)))])
    assert len(data) == 32_768
    assert read(file, data) == ({(1, 1 / 8)}, ["values that are no numbers: 1 text"])


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_cut_log_of_wandb_gives_a_beginning(file, data):
    version, name = data.draw(
        st.sampled_from([*((version, "whole") for version in VERSIONS), ("wandb-axes", "transformers")])
    )
    (log,) = (FIXTURES / version).rglob(f"run-{name}.wandb")
    whole, written = of_version(version, name)[0], log.read_bytes()
    file.write_bytes(written[: data.draw(st.integers(7, len(written) - 1))])
    (run,) = runs(file).values()
    for name, series in run.series.items():
        assert series.value.tobytes() == whole.series[name].value[: len(series)].tobytes()
        assert series.step == whole.series[name].step[: len(series)]
