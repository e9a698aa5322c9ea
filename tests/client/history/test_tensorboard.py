"""Event files of real clients, read to the bit; and cut or damaged at any byte."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from event_files import framed, scalar
from hypothesis import given, settings
from hypothesis import strategies as st

from perfagent.wire.quantities import some
from perfagent_client.history import OldRun, find_runs
from perfagent_client.history.crc32c import checksums, crc32c

FIXTURES = Path(__file__).parents[2] / "data" / "history"
FORMAT = "tensorboard"
WRITERS = ("tensorboard-tensorboardX-2.6", "tensorboard-torch-2.13")


def runs(path: Path) -> dict[str, OldRun]:
    return {run.source: run for source in find_runs([path]) if source.format == FORMAT for run in source.read()}


def exact(run: OldRun) -> dict[str, list[list[object]]]:
    return {
        name: [[s, t.hex(), v.hex()] for s, t, v in zip(series.step, series.time, series.value, strict=True)]
        for name, series in run.series.items()
    }


@pytest.mark.parametrize("writer", WRITERS)
def test_scalars_equal_those_of_tensorboard(writer):
    folder = FIXTURES / writer
    truth = json.loads((folder / "truth.json").read_text())
    read = {source.removeprefix(f"tensorboard:{folder}/"): exact(run) for source, run in runs(folder).items()}
    plain = truth["plain"]
    plain["hparams/best"] = truth.pop("plain/hparams")["best"]
    for name in [name for name in truth if name.startswith("plain/both_")]:
        plain[name.removeprefix("plain/").replace("_", "/")] = truth.pop(name)["both"]
    assert read == truth, "what a writer puts into sub-folders is of its run"


def test_sub_folder_with_a_curve_of_its_own_is_a_run(tmp_path):
    """Also where its tags begin like those of hyperparameters: Lightning writes them into the file of the run."""
    torch = FIXTURES / "tensorboard-torch-2.13" / "plain"
    (begin,) = (torch / "hparams").glob("*tfevents*")
    for name, data in (("", RECORDS[:1]), ("a", RECORDS), ("b", [begin.read_bytes(), *RECORDS])):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / begin.name).write_bytes(b"".join(data))
    assert sorted(len(run.series["loss"]) for run in runs(tmp_path).values()) == [1, 20, 20]


def test_every_type_of_tensor_is_read():
    (run,) = runs(FIXTURES / "tensorboard-torch-2.13" / "tensors").values()
    floats = {"float64", "float32", "float16", "bfloat16"}
    whole = {"int8", "int16", "int32", "int64", "uint8", "uint16"}
    assert {name.partition("/")[0] for name in run.series} == floats | whole | {"bool"}
    assert run.left_out == ["values that are no numbers: 3 tensors"]


def test_what_is_no_number_is_counted():
    run = runs(FIXTURES / "tensorboard-torch-2.13")[f"tensorboard:{FIXTURES}/tensorboard-torch-2.13/plain"]
    assert run.left_out == ["values that are no numbers: 1 histogram, 1 image, 1 text"]


@pytest.mark.parametrize("writer", WRITERS)
def test_hyperparameters_are_the_config(writer):
    (run,) = runs(FIXTURES / writer / "plain").values()
    (alone,) = runs(FIXTURES / writer / "plain" / "hparams").values()
    assert run.config == alone.config
    assert (run.config["lr"], run.config["depth"]) == (0.1, 3)
    assert (run.name, alone.name) == (f"{writer}/plain", "plain/hparams")


def test_hparams_yaml_of_lightning_is_the_config(tmp_path):
    events = next((FIXTURES / "tensorboard-torch-2.13" / "plain" / "hparams").glob("*tfevents*"))
    (tmp_path / events.name).write_bytes(events.read_bytes())
    (tmp_path / "hparams.yaml").write_text(
        "lr: 0.5\nbetas: !!python/tuple [0.9, 0.99]\nact: !!python/name:torch.relu ''\n"
    )
    (run,) = runs(tmp_path).values()
    assert run.config == {"lr": 0.5, "betas": [0.9, 0.99], "act": ""}


RECORDS = [framed([scalar("loss", step, step / 8, 1e9 + step)]) for step in range(20)]
SIZE = len(RECORDS[0])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events") / "events.out.tfevents.1.host"


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20 * SIZE - 1))
def test_a_cut_file_is_read_as_far_as_it_is_whole(file, length):
    file.write_bytes(b"".join(RECORDS)[:length])
    (run,) = runs(file.parent).values()
    whole, rest = divmod(length, SIZE)
    assert (run.series["loss"].step.tolist() if whole else []) == [*range(whole)]
    assert run.left_out == ([f"the last {some(rest, 'byte')} of {file.name} are cut"] if rest else [])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 20 * SIZE - 1), st.integers(1, 255))
def test_a_damaged_byte_changes_no_value(file, at, change):
    data = bytearray(b"".join(RECORDS))
    data[at] ^= change
    file.write_bytes(data)
    (run,) = runs(file.parent).values()
    series = run.series.get("loss")
    read = set(zip(series.step, series.value, strict=True)) if series else set()
    assert read <= {(step, step / 8) for step in range(20)} - {(at // SIZE, at // SIZE / 8)}
    assert len(run.left_out) == 1


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_under_its_name_are_no_crash(file, data):
    file.write_bytes(data)
    runs(file.parent)
    file.write_bytes(framed([data]))
    runs(file.parent)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=400)))
def test_checksums_of_many_equal_those_of_each(records):
    assert checksums(records) == [crc32c(record) for record in records]


def test_crc32c_equals_that_of_its_standard():
    assert crc32c(b"123456789") == 0xE3069283
    assert checksums([bytes(range(32))]) == [0x46DD794E]


def test_without_numpy_checksums_are_the_same(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert checksums([b"123456789", bytes(100)]) == [0xE3069283, crc32c(bytes(100))]


def beginning(run: OldRun, whole: OldRun) -> bool:
    parts = ((of, whole.series[name]) for name, of in run.series.items())
    return all(of.value.tobytes() == same.value[: len(of)].tobytes() for of, same in parts)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_cut_file_of_torch_gives_a_beginning(tmp_path_factory, data):
    (written,) = (FIXTURES / "tensorboard-torch-2.13" / "plain").glob("*tfevents*")
    (whole,) = runs(written).values()
    events = written.read_bytes()
    file = tmp_path_factory.mktemp("cut") / written.name
    file.write_bytes(events[: data.draw(st.integers(1, len(events) - 1))])
    (run,) = runs(file).values()
    assert beginning(run, whole)
