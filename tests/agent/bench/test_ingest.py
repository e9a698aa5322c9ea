"""`perfagent bench ingest`: real agents' frames over HTTP, and all that was acknowledged is read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from api_builders import listening
from command_line import command

from perfagent_server.ingest_benchmark.agents import NAMES
from perfagent_server.runs.run_filters import TableQuery

pytestmark = pytest.mark.real


def measured(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    ended = command(capsys, "bench", "ingest", *words, "--json")
    assert ended.code == 0, ended.err
    return dict(json.loads(ended.out))


def test_it_starts_a_server_and_nothing_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(capsys, "--agents", "5", "--seconds", "2", "--period", "0.2", "--processes", "2")
    assert found["lost"] == 0
    assert found["problem"] == ""
    assert 5 <= found["frames"] <= 55
    assert found["acknowledged"] >= found["frames"]
    assert 0 < found["ack_ms"]["p50"] <= found["ack_ms"]["p99"] <= found["ack_ms"]["max"]
    assert found["server"]["cpu_us_per_frame"] > 0
    assert found["server"]["peak_rss_bytes"] > 10e6


def test_the_runs_are_whole_runs_of_a_server_that_was_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with listening(tmp_path) as server:
        words = ("--url", server.url, "--agents", "3", "--seconds", "1", "--period", "0.25")
        ended = command(capsys, "bench", "ingest", *words)
        assert ended.code == 0
        assert "lost           0 of" in ended.out
        assert "server  " not in ended.out, "what the server takes is not known from outside"
        services = server.app.state.services
        runs, _ = services.runs.page(TableQuery())
        assert [run.project for run in runs] == ["bench"] * 3
        assert {run.state for run in runs} == {"finished"}
        assert sorted(services.store.names(runs[0].run)) == sorted(NAMES)


@pytest.mark.fault
def test_s05_refusals_are_followed_and_the_frame_comes_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with listening(tmp_path, requests_per_s=0.5) as server:  # five at once, then one in two seconds
        found = measured(capsys, "--url", server.url, "--agents", "1", "--seconds", "3", "--period", "0.3")
        assert found["refused"] >= 1
        assert found["lost"] == 0
