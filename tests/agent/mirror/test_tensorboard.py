"""The event files are what was recorded, read by TensorBoard's own reader."""

from __future__ import annotations

import math
import sys
from collections import deque
from itertools import pairwise
from pathlib import Path

import pytest
from agent.scripts import run_script
from agent_recorded import Recording

import perfagent
from perfagent import session
from perfagent.errors import ConfigError
from perfagent.mirror.epochs import Epochs
from perfagent.wire import Group

LOOP = """
    import time
    import torch
    import perfagent

    run = perfagent.attach(tensorboard="board")
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(20, 8), batch_size=4)
    held_out = torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=4)
    for epoch in range(3):
        for x in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.002)
            run.log({"mine": float("nan") if run.steps_done == 7 else 0.5 * run.steps_done})
        with torch.no_grad():
            for x in held_out:
                model(x)
"""
CLOSE = """if epoch == 0:
            import os
            from pathlib import Path
            def files():
                return [link for link in Path("/proc/self/fd").iterdir() if "events.out" in os.path.realpath(link)]
            while not files():
                time.sleep(0.01)
            os.close(int(files()[0].name))
        with torch.no_grad():"""


def trained(folder: Path, script: str = LOOP, **environment: str) -> tuple[Recording, str]:
    folder.mkdir(exist_ok=True)
    done = run_script(folder, script, **environment)
    assert done.returncode == 0, done.stderr
    return Recording(folder / "record"), done.stderr


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {tag: sorted((one.step, one.value) for one in read.Scalars(tag)) for tag in read.Tags()["scalars"]}


def same(one: list[tuple[int, float]], other: list[tuple[int, float]]) -> bool:
    """Event files hold float32."""
    return [step for step, _ in one] == [step for step, _ in other] and all(
        math.isclose(a, b, rel_tol=1e-6) or (math.isnan(a) and math.isnan(b))
        for (_, a), (_, b) in zip(one, other, strict=True)
    )


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, dict[str, list[tuple[int, float]]]]:
    folder = tmp_path_factory.mktemp("loop")
    recording, said = trained(folder)
    assert said == ""
    return recording, read(folder / "board")


@pytest.mark.real
def test_every_series_is_in_the_event_file_value_by_value(loop):
    recording, board = loop
    assert same(board["mine"], [(step, math.nan if step == 7 else 0.5 * step) for step in range(1, 16)])
    for name in ("loss", "lr", "step_time_s", "phase/forward_s", "samples_per_s", "process/rss_bytes", "mine"):
        assert same(board[name], recording.series(name)), name
    assert same(board["System/Samples_Per_Second"], board["samples_per_s"])


@pytest.mark.real
def test_the_sums_over_epochs_stand_at_the_last_step_of_each(loop):
    recording, board = loop
    times = dict(recording.series("step_time_s"))

    def sums(name: str) -> list[tuple[int, float]]:
        values = dict(recording.series(name))
        return [
            (end, sum(values.get(step, 0.0) for step in range(end - 4, end + 1) if step in times))
            for end in (5, 10, 15)
        ]

    for tag in ("forward", "backward", "optimizer"):
        assert same(board[f"perf/epoch_{tag}_time"], sums(f"phase/{tag}_s")), tag
    data, whole = sums("phase/data_s"), sums("step_time_s")
    assert same(board["perf/epoch_data_loading_time"], data)
    shares = [(end, 100 * spent / total) for (end, spent), (_, total) in zip(data, whole, strict=True)]
    assert same(board["perf/epoch_data_loading_ratio"], shares)
    for (_, compute), (_, share) in zip(board["perf/epoch_compute_ratio"], shares, strict=True):
        assert 0 < compute < compute + share < 100
    assert 0.01 < board["perf/epoch_avg_memory_gb"][-1][1] < 20


@pytest.mark.real
def test_the_environment_names_it_and_only_rank_zero_writes(tmp_path):
    script = LOOP.replace('tensorboard="board"', "")
    trained(tmp_path / "0", script, PERFAGENT_TENSORBOARD="board")
    assert len(read(tmp_path / "0" / "board")["loss"]) == 15
    other = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    trained(tmp_path / "1", script, PERFAGENT_TENSORBOARD="board", **other)
    assert not (tmp_path / "1" / "board").exists()


@pytest.mark.real
@pytest.mark.parametrize("fault", ["cannot be written", "closed meanwhile"])
def test_a_file_that_fails_is_told_once_and_the_run_goes_on(tmp_path, fault):
    script = LOOP.replace("with torch.no_grad():", CLOSE)
    if fault == "cannot be written":
        script = LOOP.replace('tensorboard="board"', 'tensorboard="/proc/board"')
    recording, said = trained(tmp_path, script)
    (line,) = said.splitlines()
    assert line.startswith("perfagent: ") and "TensorBoard" in line
    assert fault != "cannot be written" or "/proc/board" in line
    assert len(recording.series("loss")) == 15


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setenv("PERFAGENT_RECORD", str(tmp_path / "record"))
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        perfagent.init(tensorboard=tmp_path / "board")
    assert session.current() is None
    monkeypatch.setenv("PERFAGENT_TENSORBOARD", str(tmp_path / "board"))
    with pytest.raises(ConfigError, match=r"PERFAGENT_TENSORBOARD: .*pip install tensorboard"):
        perfagent.init()


def test_epochs_end_where_they_end_however_the_samples_come():
    """Frames are cut anywhere, and one may hold several epochs, or the beginning of one of which there is nothing
    yet."""
    begins = [11, 14, 31]
    for size in (1, 7, 30):
        epochs, found = Epochs(), []
        for first, behind in pairwise([*range(1, 31, size), 31]):
            part = [*range(first, behind)]
            times = {"step_time_s": 1.0, "phase/data_s": 0.5, "phase/comm_s": 0.25}
            values = {name: [seconds] * len(part) for name, seconds in times.items()}
            begun = deque(begin for begin in begins if first <= begin < behind or begin == behind == 31)
            found += epochs.add([Group(part, [float(step) for step in part], part, values)], begun)
        assert [(step, values["perf/epoch_time"]) for step, _, values in found] == [(10, 10.0), (13, 3.0), (30, 17.0)]
        for name, share in (("data_loading", 50.0), ("communication", 25.0)):
            assert {values[f"perf/epoch_{name}_ratio"] for _, _, values in found} == {share}
        assert [*epochs.end()] == []
