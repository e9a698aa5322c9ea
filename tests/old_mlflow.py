"""What MLflow wrote (scripts/history_fixtures), laid out as it was."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from perfagent_client.history import OldRun, find_runs

DATA = Path(__file__).parent / "data/history"
VERSIONS = ["mlflow-2.9", "mlflow-3.17"]


def database(version: str, folder: Path) -> Path:
    path = folder / "mlflow.db"
    path.write_bytes(gzip.decompress((DATA / version / "mlflow.db.gz").read_bytes()))
    return path


def files(version: str, folder: Path) -> Path:
    for name, text in json.loads((DATA / version / "mlruns.json").read_text()).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder / "mlruns"


def runs_in(path: Path) -> dict[str, OldRun]:
    return {run.source: run for source in find_runs([path]) for run in source.read()}
