from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from builders import RecordingSender
from progress import new_progress

from perfagent.delivery.columns import Columns
from perfagent.delivery.drain import Collector
from perfagent.device import readings


@pytest.fixture
def sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Without threads, its session's progress in place: forty steps are made, and nothing was on a device."""
    monkeypatch.setattr(readings, "_device", None)
    made: Any = RecordingSender(tmp_path)
    made.counters = Counter()
    made.progress = new_progress(made.rows)
    made.progress.completed = 40
    return made


@pytest.fixture
def collector(sender: Any) -> Collector:
    return Collector(sender, Columns())
