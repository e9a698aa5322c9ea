"""What this project writes itself: recordings and exports, with all ranks."""

from __future__ import annotations

import math
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ticks import tick_of

from perfagent.delivery.spool import Header, Spool
from perfagent.wire import Event, Group
from perfagent_client.history import OldRun, find_runs

ROWS = [
    "name,rank,step,time,value", "loss,0,1,100.5,2.5", "loss,0,2,101.5,NaN", "loss,1,1,100.25,2.0", "lr,0,1,100.5,0.1",
    "lr,0,2,101.5,0.2", "'=odd,0,2,101.5,Infinity",
]  # fmt: skip
WHOLE = ("\n".join(ROWS) + "\n").encode()


def read(path: Path) -> list[OldRun]:
    return [run for source in find_runs([path]) for run in source.read()]


def test_recording_has_all_ranks_and_events(tmp_path: Path) -> None:
    for rank in (0, 1):
        header = Header(source=f"{rank}" * 32, project="p", rank=rank, server=None, run="rec", attempt=1, name="night")
        spool = Spool(tmp_path / "recorded" / header.source, header, recording=True)
        began = Event(kind="state", time=1.7e9, data={"state": "starting", "world_size": 2})
        spool.append(
            *tick_of(
                [Group([1, 2], [1.7e9, 1.7e9 + 1], [0.0, 1.0], {"loss": array("f", [rank + 0.5, math.nan])})], [began]
            ),
            now=0.0,
        )
        spool.close()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    [run] = read(tmp_path)
    assert (run.source, run.name, run.project) == ("perfagent:rec", "night", "p")
    assert [(one.rank, len(one.events)) for one in run.processes] == [(0, 1), (1, 1)]
    assert list(run.series["loss"].step) == [1, 2] and run.series["loss"].value[0] == 0.5
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def jsonl() -> bytes:
    rows = [row.split(",") for row in ROWS[1:]]
    lines = [
        f'{{"name":"{name.removeprefix(chr(39))}","rank":{rank},"step":{step},"time":{time},"value":'
        + (f'"{value}"' if value in ("NaN", "Infinity") else value) + "}"
        for name, rank, step, time, value in rows
    ]  # fmt: skip
    return ("\n".join(lines) + "\n").encode()


def parquet(file: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    rows = [row.split(",") for row in ROWS[1:]]
    columns = {
        "name": [row[0].removeprefix("'") for row in rows], "rank": pyarrow.array([int(row[1]) for row in rows], "int32"),
        "step": [int(row[2]) for row in rows], "time": [float(row[3]) for row in rows], "value": [float(row[4]) for row in rows],
    }  # fmt: skip
    write_table(pyarrow.table(columns), file)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_export_is_read_as_it_was_written(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"samples.{kind}"
    if kind == "parquet":
        parquet(file)
    else:
        file.write_bytes(WHOLE if kind == "csv" else jsonl())
    [run] = read(tmp_path)
    assert list(run.series) == ["loss", "lr", "=odd"] and run.left_out == []
    assert [value.hex() for value in run.series["loss"].value] == [(2.5).hex(), math.nan.hex()]
    assert list(run.series["lr"].time) == [100.5, 101.5]
    [first, second] = run.processes
    assert (second.rank, second.groups[0].column("loss")[0], second.groups[0].times()[0]) == (1, 2.0, 100.25)
    assert {name for group in first.groups for name in group.values} == {"loss", "lr", "=odd"}


@settings(deadline=None)
@given(st.integers(0, len(WHOLE)))
def test_export_cut_at_any_byte_has_no_wrong_value(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    file = tmp_path_factory.mktemp("cut") / "samples.csv"
    file.write_bytes(WHOLE[:size])
    known = {
        (row.split(",")[0].removeprefix("'"), row.split(",")[2], float(row.split(",")[4]).hex()) for row in ROWS[1:]
    }
    for run in read(file):
        for name, one in run.series.items():
            found = {(name, str(step), value.hex()) for step, value in zip(one.step, one.value, strict=True)}
            assert found <= known
