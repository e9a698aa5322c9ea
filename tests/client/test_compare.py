"""`perfagent compare`: what it says of runs whose difference is known."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from api_builders import Listening, frame, listening
from command_line import command
from syrupy.assertion import SnapshotAssertion

from perfagent.wire import Event
from perfagent_client.compare.change import Change, changes, mean_changes
from perfagent_client.compare.pages import comparison_page, headline

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    with listening(tmp_path_factory.mktemp("compare")) as running:
        for name, wait in (("before", 0.25), ("after", 0.02)):
            step = np.arange(1, 301)
            times = (0.25 + wait) * np.exp(np.random.default_rng(3).normal(0, 0.03, 300))
            values = {
                "loss": (1 + 2 / step).tolist(), "step_time_s": times.tolist(), "samples_per_s": (32 / times).tolist(),
                "phase/data_s": np.full(300, wait).tolist(), "process/rss_bytes": np.full(300, 2.0**30).tolist(),
            }  # fmt: skip
            state = {"state": "starting", "name": name, "config": {"workers": 0 if name == "before" else 8}}
            sent = frame(values, run=name, events=[Event(kind="state", time=1_700_000_000.0, step=0, data=state)])
            running.take(sent)
        yield running


def test_the_first_line_says_how_much_faster_and_why(server: Listening, capsys: pytest.CaptureFixture[str]) -> None:
    done = command(capsys, "compare", "before", "after", "--server", server.url)
    assert done.code == 0, done.err
    first = done.out.splitlines()[0]
    assert first.startswith("after is 85")
    assert first.endswith("data wait is 230 ms a step shorter.")
    assert "workers" in done.out
    assert "1 GiB" in done.out
    assert "(+84.2 to +86.2 %)" in done.out


def test_the_same_as_json_and_windows_of_one_run(server: Listening, capsys: pytest.CaptureFixture[str]) -> None:
    done = command(capsys, "compare", "before:1-150", "before:151-300", "--json", "--server", server.url)
    found = json.loads(done.out)
    assert [(side["begin"], side["end"]) for side in found["sides"]] == [(1, 150), (151, 300)]
    assert found["speed"][0]["word"][1] == "same"
    cut = command(capsys, "compare", "before:1-2", "before:1-9999", "--json", "--server", server.url)
    assert [side["name"] for side in json.loads(cut.out)["sides"]] == ["before:1-2", "before:1-300"]
    refused = command(capsys, "compare", "before", "before:5000-6000", "--server", server.url)
    assert refused.code == 2 and "after the run's last step" in refused.err


def test_one_run_and_an_unknown_run_are_told(server: Listening, capsys: pytest.CaptureFixture[str]) -> None:
    one = command(capsys, "compare", "before", "--server", server.url)
    assert one.code == 2
    assert "at least two are compared" in one.err
    unknown = command(capsys, "compare", "before", "nowhere", "--server", server.url)
    assert unknown.code == 1
    assert "there is no run 'nowhere'" in unknown.err


def test_headlines(words: SnapshotAssertion) -> None:
    found = [
        Change("faster", "tokens_per_s", 31.2, 28.4, 34.1, "phase/data_s", 0.02), Change("same", "tokens_per_s", high=1.7),
        Change("slower", "step_time_s", 1110, 900, 1250), Change("unknown"),
        Change("too_short", "step_time_s", lacking="a", steps=38, independent=38),
        Change("too_short", "step_time_s", lacking="b", steps=379, independent=12),
        Change("slower", "tokens_per_s", phase="phase/data_s", seconds=0.152, times=3.02),
    ]  # fmt: skip
    assert "\n".join(headline("b", "a", change) for change in found) == words


def measure(word: str, low: float | None, high: float | None) -> dict[str, object]:
    edges = {"low": [None, low], "high": [None, high], "ratio": [None, low and high and (low + high) / 2]}
    counts = {"steps": [40, 40], "independent": [40, 40]}
    return {"name": "step_time_s", "values": [0.5, 0.6], "word": ["first", word], **edges, **counts}


def test_named_phase_explains_a_part_of_the_change() -> None:
    step = measure("slower", 1.4, 1.6) | {"values": [1.0, 1.5]}
    for grown, phase in ((0.05, ""), (0.3, "phase/comm_s")):
        comm = measure("", 1.4, 1.6) | {"name": "phase/comm_s", "values": [0.1, 0.1 + grown]}
        found = {"sides": [{}, {}], "speed": [step, comm]}
        assert [one.phase for one in changes(found)] == [phase]


@pytest.mark.parametrize(
    ("values", "steps", "word", "times"),
    [([0.1, 0.3], 300, "slower", 3.0), ([0.3, 0.1], 50, "faster", 3.0), ([0.1, 0.14], 300, "too_short", 0.0),
     ([0.1, 0.3], 49, "too_short", 0.0), ([None, 0.3], 300, "too_short", 0.0)],
)  # fmt: skip
def test_a_plain_difference_needs_no_interval(values: list[float | None], steps: int, word: str, times: float) -> None:
    step = measure("too_short", None, None) | {"values": values, "steps": [steps, 900], "independent": [12, 30]}
    [change] = changes({"sides": [{"name": "a"}, {"name": "b"}], "speed": [step]})
    assert (change.word, change.times) == (word, pytest.approx(times))


def test_the_table_does_not_deny_a_plain_difference() -> None:
    step = measure("too_short", None, None) | {"values": [0.1, 1.0], "steps": [300, 900], "independent": [12, 30]}
    side = dict.fromkeys(("begin", "loss_at"), None) | {"state": "", "title": "", "peaks": {}, "only": []}
    nothing = {"mean_step": None, "gains": [], "not_alike": [], "differences": {"different": [], "equal": {}}}
    sides = [side | {"name": "a"}, side | {"name": "b"}]
    said = str([*comparison_page({"sides": sides, "speed": [step | {"shares": [None, None]}], **nothing})])
    assert "b is about 10 × slower" in said and "1 s too few steps for an interval" in said


@pytest.mark.parametrize(
    ("median", "mean", "adds"),
    [
        (("same", 0.99, 1.01), ("slower", 1.1, 1.2), True),
        (("slower", 1.01, 1.03), ("slower", 1.1, 1.2), True),
        (("slower", 1.05, 1.15), ("slower", 1.1, 1.2), False),
        (("faster", 0.8, 0.9), ("same", 0.9, 1.1), False),
        (("same", 0.99, 1.01), ("too_short", None, None), False),
    ],
)
def test_the_mean_is_told_where_slow_steps_change_the_story(
    median: tuple[str, float, float], mean: tuple[str, float | None, float | None], adds: bool
) -> None:
    found = {"sides": [{}, {}], "speed": [measure(*median)], "mean_step": measure(*mean)}
    assert [one is not None for one in mean_changes(found)] == [adds]
