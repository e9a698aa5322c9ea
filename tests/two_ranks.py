"""Jobs of two ranks, each of which writes RANK.json into the folder that it is given."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from builders import free_port, job_environment
from preloaded import run


def of_two_ranks(script: Path, folder: Path, *words: str, **environment: str) -> list[dict[str, Any]]:
    """What each rank wrote."""
    port, path = str(free_port()), os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"} | environment
    environments = [
        job_environment(folder / rank, RANK=rank, LOCAL_RANK=rank, PYTHONPATH=path, **meeting) for rank in ("0", "1")
    ]
    ended = run([str(script), str(folder), *words], folder, environments)
    assert [one.returncode for one in ended] == [0, 0], ended
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
