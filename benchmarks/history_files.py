"""One training in each format that `perfagent_client.history` reads, of any length, for benchmarks/history.py.

The trackers themselves would take hours for a million points. Files that they wrote are what tests/client/history reads.
"""

from __future__ import annotations

import csv
import json
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np

from perfagent_client.history.crc32c import checksums

__all__ = ["FORMATS", "NAMES", "Format", "Training"]

NAMES = ("loss", "lr", "grad/norm", "val/loss", *(f"layers/{number:02}/norm" for number in range(16)))


@dataclass(frozen=True)
class Training:
    """steps: 1, 2 ...; times: Unix seconds; values: of each step and name, float64 that are float32 as well, as event files
    hold those."""

    steps: list[int]
    times: list[float]
    values: np.ndarray

    @classmethod
    def of(cls, steps: int) -> Training:
        values = np.random.default_rng(0).random((steps, len(NAMES)), np.float32).astype(np.float64)
        return cls([*range(1, steps + 1)], [1.7e9 + step for step in range(1, steps + 1)], values)

    def rows(self) -> Iterator[tuple[int, float, dict[str, float]]]:
        """Step, time and values by name."""
        for step, time, values in zip(self.steps, self.times, self.values.tolist(), strict=True):
            yield step, time, dict(zip(NAMES, values, strict=True))

    def points(self) -> Iterator[tuple[str, int, float, float]]:
        """Name, step, time and value, one series after the other."""
        for name, values in zip(NAMES, self.values.T.tolist(), strict=True):
            for step, time, value in zip(self.steps, self.times, values, strict=True):
                yield name, step, time, value


# ---- protobuf: TensorBoard, W&B


def _varint(value: int) -> bytes:
    return bytes((value & 127 | 128,)) + _varint(value >> 7) if value > 127 else bytes((value,))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _tensorboard(folder: Path, training: Training) -> None:
    """An event for each value, as add_scalar writes."""
    with (folder / "events.out.tfevents.1700000000.host").open("wb") as file:
        events: list[bytes] = []
        for step, time, row in training.rows():
            head = b"\x09" + struct.pack("<d", time) + b"\x10" + _varint(step)
            for name, value in row.items():
                summary = _field(1, _field(1, name.encode()) + b"\x15" + struct.pack("<f", value))
                events.append(head + _field(5, summary))
            if step % 1000 == 0 or step == training.steps[-1]:
                file.write(b"".join(_framed(events)))
                events = []


def _framed(records: list[bytes]) -> Iterator[bytes]:
    for record, checksum in zip(records, checksums(records), strict=True):
        yield _size(len(record)) + record + _masked(checksum)


@lru_cache
def _size(length: int) -> bytes:
    size = struct.pack("<Q", length)
    return size + _masked(checksums([size])[0])


def _masked(checksum: int) -> bytes:
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFF_FFFF)


def _wandb(folder: Path, training: Training) -> None:
    inside = folder / "offline-run-20260101_000000-abc"
    inside.mkdir()
    run = _field(17, _field(1, b"abc") + _field(3, b"fast"))
    with (inside / "run-abc.wandb").open("wb") as file:
        file.writelines(_leveldb(chain([run], _history(training))))


def _history(training: Training) -> Iterator[bytes]:
    for step, time, row in training.rows():
        items = {**row, "_step": step, "_timestamp": time, "_runtime": step}
        pairs = (_field(2, name.encode()) + _field(16, json.dumps(value).encode()) for name, value in items.items())
        yield _field(2, b"".join(_field(1, pair) for pair in pairs) + _field(2, b"\x08" + _varint(step)))


def _leveldb(records: Iterable[bytes]) -> Iterator[bytes]:
    """Chunks, of which none goes over the end of a block of 32 KiB."""
    yield b":W&B\xe1\xbe\x00"
    left = 32_768 - 7
    for record in records:
        first = True
        while record or first:
            if left < 7:
                yield bytes(left)
                left = 32_768
            part, record = record[: left - 7], record[left - 7 :]
            kind = bytes((1 if first and not record else 2 if first else 3 if record else 4,))
            yield struct.pack("<IH", zlib.crc32(kind + part), len(part)) + kind + part
            left, first = left - 7 - len(part), False


# ---- databases and folders: MLflow, trackio, Neptune

_MLFLOW = """
CREATE TABLE experiments (experiment_id INTEGER PRIMARY KEY, name VARCHAR(256), lifecycle_stage VARCHAR(32));
CREATE TABLE runs (run_uuid VARCHAR(32) PRIMARY KEY, name VARCHAR(250), status VARCHAR(9), start_time BIGINT, end_time BIGINT,
    lifecycle_stage VARCHAR(20), experiment_id INTEGER);
CREATE TABLE params ("key" VARCHAR(250), value VARCHAR(8000), run_uuid VARCHAR(32), PRIMARY KEY ("key", run_uuid));
CREATE TABLE tags ("key" VARCHAR(250), value VARCHAR(8000), run_uuid VARCHAR(32), PRIMARY KEY ("key", run_uuid));
CREATE TABLE metrics ("key" VARCHAR(250) NOT NULL, value FLOAT NOT NULL, timestamp BIGINT NOT NULL, run_uuid VARCHAR(32) NOT NULL,
    step BIGINT DEFAULT '0' NOT NULL, is_nan BOOLEAN DEFAULT '0' NOT NULL,
    PRIMARY KEY ("key", timestamp, step, run_uuid, value, is_nan));
CREATE INDEX index_metrics_run_uuid ON metrics (run_uuid);
CREATE INDEX index_metrics_run_uuid_key_step ON metrics (run_uuid, "key", step);
INSERT INTO experiments VALUES (1, 'fast', 'active');
INSERT INTO runs VALUES ('0123456789abcdef0123456789abcdef', 'run', 'FINISHED', 1700000000000, 1700000001000, 'active', 1);
"""
_TRACKIO = """
CREATE TABLE metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, timestamp TEXT NOT NULL, run_name TEXT NOT NULL,
    step INTEGER NOT NULL, metrics TEXT NOT NULL, log_id TEXT, space_id TEXT);
CREATE INDEX idx_metrics_run_step ON metrics(run_id, step);
"""


def _mlflow_database(folder: Path, training: Training) -> None:
    rows = (
        (name, value, int(1000 * time), "0123456789abcdef0123456789abcdef", step)
        for step, time, row in training.rows()
        for name, value in row.items()
    )
    _fill(folder / "mlflow.db", _MLFLOW, "metrics (key, value, timestamp, run_uuid, step) VALUES (?, ?, ?, ?, ?)", rows)


def _mlflow_files(folder: Path, training: Training) -> None:
    run = folder / "mlruns/1/0123456789abcdef0123456789abcdef"
    run.mkdir(parents=True)
    (run.parent / "meta.yaml").write_text("experiment_id: '1'\nlifecycle_stage: active\nname: fast\n")
    (run / "meta.yaml").write_text(f"experiment_id: '1'\nlifecycle_stage: active\nrun_id: {run.name}\nstatus: 3\n")
    for at, name in enumerate(NAMES):
        file = run / "metrics" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        points = zip(training.times, training.values[:, at].tolist(), training.steps, strict=True)
        file.write_text("".join(f"{int(1000 * time)} {value} {step}\n" for time, value, step in points))


def _trackio(folder: Path, training: Training) -> None:
    rows = (
        (
            "a",
            datetime.fromtimestamp(time, UTC).isoformat(),
            "run",
            step,
            json.dumps(row, separators=(",", ":")).encode(),
        )
        for step, time, row in training.rows()
    )
    statement = "metrics (run_id, timestamp, run_name, step, metrics) VALUES (?, ?, ?, ?, ?)"
    _fill(folder / "fast.db", _TRACKIO, statement, rows)


def _fill(file: Path, tables: str, insert: str, rows: Iterable[tuple[object, ...]]) -> None:
    with closing(sqlite3.connect(file)) as database:
        database.executescript(tables)
        database.executemany(f"INSERT INTO {insert}", rows)
        database.commit()


def _neptune(folder: Path, training: Training) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    series, size = len(NAMES), len(NAMES) * len(training.steps)
    nothing = {
        f"{kind}_value": pa.nulls(size, pa.string()) for kind in ("int", "string", "bool", "datetime", "string_set")
    }
    columns = {
        "project_id": pa.array(["team/fast"]).take(pa.array(np.zeros(size, np.int32))),
        "run_id": pa.array(["RUN-1"]).take(pa.array(np.zeros(size, np.int32))),
        "attribute_path": pa.array(NAMES).take(pa.array(np.repeat(np.arange(series), len(training.steps)))),
        "attribute_type": pa.array(["float_series"]).take(pa.array(np.zeros(size, np.int32))),
        "step": pa.array(np.tile(np.array(training.steps, np.int32), series)).cast(pa.decimal128(18, 6)),
        "timestamp": pa.array(np.tile(1000 * np.array(training.times), series).astype("datetime64[ms]")),
        "float_value": pa.array(training.values.T.reshape(-1)),
    }
    parquet.write_table(pa.table({**columns, **nothing}), folder / "RUN-1-0123456789abcdef_part_0.parquet")


# ---- text


def _trainer_state(folder: Path, training: Training) -> None:
    history = [{**row, "step": step} for step, _, row in training.rows()]
    state = {"global_step": training.steps[-1], "log_history": history}
    (folder / "trainer_state.json").write_text(json.dumps(state, indent=2, sort_keys=True))


def _csv(folder: Path, training: Training) -> None:
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("step", *NAMES))
        writer.writerows((step, *row.values()) for step, _, row in training.rows())


def _json_lines(folder: Path, training: Training) -> None:
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": step, "time": time, **row}) + "\n" for step, time, row in training.rows())


def _transformers(folder: Path, training: Training) -> None:
    """A dict above the progress bar, which is drawn anew below it."""
    last = training.steps[-1]
    with (folder / "train.log").open("w") as file:
        file.writelines(
            f"{row}\n {step / last:4.0%}|#| {step}/{last} [01:23<04:56]\r" for step, _, row in training.rows()
        )


def _nanogpt(folder: Path, training: Training) -> None:
    with (folder / "train.log").open("w") as file:
        for step, _, row in training.rows():
            file.write(f"iter {step}: " + ", ".join(f"{name} {value}" for name, value in row.items()) + "\n")


def _export(folder: Path, training: Training) -> None:
    with (folder / "run.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("name", "rank", "step", "time", "value"))
        writer.writerows((name, 0, step, time, value) for name, step, time, value in training.points())


@dataclass(frozen=True)
class Format:
    """write: into an empty folder. is_timed: whether its files say when a step was."""

    name: str
    write: Callable[[Path, Training], None]
    is_timed: bool = True


FORMATS = (
    Format("TensorBoard event file", _tensorboard),
    Format("W&B offline log", _wandb),
    Format("MLflow, SQLite", _mlflow_database),
    Format("MLflow, `mlruns/`", _mlflow_files),
    Format("trackio, SQLite", _trackio),
    Format("Neptune, Parquet", _neptune),
    Format("`trainer_state.json`", _trainer_state, is_timed=False),
    Format("CSV, one row per step", _csv, is_timed=False),
    Format("JSON lines, one row per step", _json_lines),
    Format("printed by Transformers", _transformers, is_timed=False),
    Format("printed as by nanoGPT", _nanogpt, is_timed=False),
    Format("`perfagent export`, CSV", _export),
)
