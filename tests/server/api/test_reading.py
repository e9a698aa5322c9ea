"""A finding is stored in English, and said in the language of who reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_builders import api
from builders import until
from fastapi.testclient import TestClient

CHINESE = {"accept-language": "zh-CN,zh;q=0.9,en;q=0.8"}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with api(tmp_path) as opened:
        rows = [{"run": "r", "step": step, "metrics": {"loss": 1.0 if step < 9 else "NaN"}} for step in range(10)]
        assert opened.post("/api/v1/log", json=rows).status_code == 200
        until(lambda: opened.get("/api/v1/alerts").json()["alerts"])
        yield opened


def has_chinese(text: str) -> bool:
    return any("一" <= character <= "鿿" for character in text)


def said(client: TestClient, headers: dict[str, str]) -> list[str]:
    """Every text about the finding, of each route that tells of it."""
    run = client.get("/api/v1/runs").json()["runs"][0]["run"]
    verdict = client.get(f"/api/v1/runs/{run}/verdict", headers=headers).json()
    (finding,) = client.get(f"/api/v1/runs/{run}/findings", headers=headers).json()["findings"]
    (listed,) = client.get(f"/api/v1/runs/{run}/alerts", headers=headers).json()["alerts"]
    alert = client.get(f"/api/v1/alerts/{listed['id']}", headers=headers).json()
    row = client.get("/api/v1/runs?with=verdict", headers=headers).json()["runs"][0]
    assert {one["rule"] for one in (verdict, finding, listed, alert, row["alerts"])} == {"nonfinite_loss"}
    long = [one[name] for one in (verdict, finding, listed, alert) for name in ("title", "message", "fix")]
    return [*long, row["verdict"]["title"], row["verdict"]["message"], row["alerts"]["title"]]


def test_reader_gets_verdict_alert_and_remedy_in_own_language(client: TestClient) -> None:
    english = said(client, {})
    assert not any(map(has_chinese, english))
    assert all(map(has_chinese, said(client, CHINESE)))
    assert said(client, {**CHINESE, "cookie": "perfagent-language=en"}) == english, "what a viewer chose wins"
    assert said(client, {"accept-language": "tlh, de;q=0.5"}) == english
