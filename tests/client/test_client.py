"""The client against the real app: typed answers, errors with a cause, exports to the bit."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import httpx
import pytest
from api_builders import ADMIN_TOKEN, Listening, frame, listening
from builders import until

from perfagent.errors import WireError
from perfagent.wire import Alert, Finding, Latest, LogRow, RunSummary, Series
from perfagent_client import ApiError, AsyncClient, Client
from perfagent_client.models import parse

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    with listening(tmp_path_factory.mktemp("client")) as running:
        yield running


@pytest.fixture
def client(server: Listening) -> Iterator[Client]:
    with Client(server.url) as opened:
        yield opened


def test_what_the_server_knows_comes_back_typed(server: Listening, client: Client) -> None:
    server.take(frame({"loss": [2.0, float("nan"), 1.0]}, name="mine"), frame({"loss": [3.0]}, rank=1))
    (summary,) = client.runs(project="p")
    assert isinstance(summary, RunSummary)
    assert client.find("mine").run == client.find("r1").run == summary.run == "r1"
    latest = client.latest("r1")["loss"]
    assert isinstance(latest, Latest) and isinstance(latest.value, float)
    series = client.series("r1", "loss", rank=0)
    assert isinstance(series, Series) and len(repr(series)) < 220
    assert series.mean[0] == 2.0 and math.isnan(series.mean[1])
    assert client.series("r1", "loss", from_step=3, to_step=3, rank=0).step == [3]
    assert client.series("r1", "loss", from_step=10_000).step == [], "the name is right, and no such step came"
    with pytest.raises(ApiError, match="no series 'los'; did you mean 'loss'") as refused:
        client.series("r1", "los")
    assert refused.value.status == 404
    assert client.ranks("r1", "loss").ranks == [0, 1]
    assert client.names("r1") == ["loss"]
    until(lambda: client.verdict("r1").rule == "nonfinite_loss", why="the NaN was not judged")
    assert isinstance(client.verdict("r1"), Finding)
    assert all(isinstance(item, Alert) for item in client.alerts("r1"))
    assert client.change("r1", notes="look").notes == "look"

    async def read() -> tuple[list[str], object, Finding]:
        async with AsyncClient(server.url) as reading:
            assert (await reading.series("r1", "loss", rank=1)).mean == [3.0]
            runs = [run.run async for run in reading.runs(project="p")]
            return runs, (await reading.latest("r1"))["loss"], await reading.verdict("r1")

    assert asyncio.run(read()) == (["r1"], latest, client.verdict("r1"))


def test_runs_beyond_one_page_are_fetched(client: Client) -> None:
    rows = [{"run": f"run-{number}", "project": "many", "metrics": {"x": 1}} for number in range(620)]
    client.request("POST", "/log", body=rows)
    assert len(list(client.runs(project="many"))) == 620
    assert len(list(client.runs(project="many", limit=7))) == 7


def test_an_export_reads_back_what_was_logged(client: Client) -> None:
    values = [0.1, 5e-324, -0.0, float("inf"), float("-inf"), float("nan")]
    for value in values:
        client.log("exported", {"x": value})
    rows = list(client.export(client.find("exported").run))
    assert all(isinstance(row, LogRow) for row in rows)
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [math.copysign(1, row.value) for row in rows[:5]] == [math.copysign(1, value) for value in values[:5]]
    assert [row.value for row in rows[:5]] == values[:5] and math.isnan(rows[5].value)


def test_errors_say_what_the_server_said(server: Listening, client: Client) -> None:
    with pytest.raises(ApiError, match="no run") as missing:
        client.run("nothing")
    assert (missing.value.status, missing.value.code, missing.value.field) == (404, "not_found", "run")
    with pytest.raises(ApiError, match="no run"):
        client.find("a/b?c#d")
    with pytest.raises(ApiError) as denied:
        client.delete("nothing")
    assert denied.value.status == 401
    with pytest.raises(ApiError) as export:
        list(client.export("nothing"))
    assert export.value.status == 404
    client.log("doomed", {"x": 1.0})
    with Client(server.url, ADMIN_TOKEN) as admin:
        admin.delete(admin.find("doomed").run)
    assert list(client.runs(name="doomed")) == []


def test_an_answer_that_is_not_ours_is_told() -> None:
    at = {"step": 1, "time": 1.0, "rank": 0}
    for wrong in ({"value": "text", **at}, {"value": True, **at}, {"value": 1.0}, []):
        with pytest.raises(WireError):
            parse(Latest, wrong)
    assert parse(Latest, {"value": 1, "step": 1, "time": 1.0, "rank": "all", "later": True}).value == 1.0
    newer = {
        "rule": "r",
        "severity": "fatal",
        "message": "m",
        "ranks": [1],
        "evidence": {"loss": "NaN"},
        "cause": "new",
    }
    finding = parse(Finding, newer)
    assert (finding.severity, finding.evidence, finding.fix) == ("fatal", {"loss": "NaN"}, "")
    assert [parse(Latest, {"value": text, **at}).value for text in ("Infinity", "-Infinity")] == [math.inf, -math.inf]


def test_a_finding_prints_as_a_sentence_and_shows_in_a_notebook() -> None:
    message = "The loader is <slow>."
    found = Finding(rule="data_bound", severity="warning", message=message, since_step=1200, fix="Add workers.")
    assert str(found) == "data_bound (warning, since step 1,200): The loader is <slow>.\n  fix: Add workers."
    assert repr(found).startswith("Finding(rule='data_bound'"), "with the evidence, for whoever debugs"
    sentence = "<b>data_bound (warning, since step 1,200)</b>: The loader is &lt;slow&gt;.<br>Fix: Add workers."
    assert sentence in found._repr_html_()


def test_another_program_at_the_address_is_asked_about() -> None:
    class Other(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(501, text="<html>", request=request)

    with Client("http://127.0.0.1:9009", transport=Other()) as client, pytest.raises(ApiError) as refused:
        list(client.runs())
    assert "answered 501, and not as a perfagent server does: is 127.0.0.1:9009 its address?" in str(refused.value)
    assert refused.value.exit_code == 1


def test_wrong_value_ends_a_command_with_2_a_missing_run_with_1() -> None:
    assert [ApiError(status, "x", "y").exit_code for status in (400, 422, 404, 403, 500)] == [2, 2, 1, 1, 1]
