"""What must stay secret of a channel: the key it signs with, and what its URL holds behind the host."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send
from builders import until
from fastapi.testclient import TestClient
from posting import Posts

PATH, QUERY, USER, PASSWORD = "Tpath0123456789abcd", "Tquery0123456789abc", "Tuser01234567", "Tpass0123456789ab"


def everything_said(client: TestClient, answers: list[Any], caplog: pytest.LogCaptureFixture) -> str:
    """All that anybody can read: answers, lists, counters, the log."""
    lists = ["/channels", "/deliveries", "/alerts", "/self", "/rules", "/runs"]
    read = [client.get(f"/api/v1{path}", headers=ADMIN).text for path in lists]
    read.append(client.get("/metrics", headers=ADMIN).text)
    return "\n".join([*(answer.text for answer in answers), *read, *caplog.messages, caplog.text])


@pytest.mark.parametrize("kind", ["webhook", "heartbeat"])
@pytest.mark.parametrize("status", [200, 410, 500])
def test_no_secret_of_a_channel_is_shown_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, status: int
) -> None:
    caplog.set_level(logging.DEBUG)
    posts = Posts(lambda _: status)
    with api(tmp_path, send=posts) as client:
        body = {"kind": kind, "url": f"{Posts.url}/{PATH}?key={QUERY}"} | (
            {"every_s": 10} if kind == "heartbeat" else {}
        )
        made = client.post("/api/v1/channels", json=body, headers=ADMIN)
        assert made.status_code == 201, made.text
        ident, secret = made.json()["id"], made.json()["secret"]
        answers = [
            client.patch(f"/api/v1/channels/{ident}", json={"min_severity": "critical"}, headers=ADMIN),
            client.post(f"/api/v1/channels/{ident}/test", headers=ADMIN),
        ]
        send(client, frame({"loss": [2.0, float("nan")]}), **ADMIN)
        until(lambda: client.get("/api/v1/alerts").json()["alerts"])
        said = everything_said(client, answers, caplog)
    assert PATH in posts.urls[0]
    assert not [word for word in (PATH, QUERY, secret) if word and word in said]


def test_no_secret_of_a_refused_channel_is_in_the_refusal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = [
        {"url": f"http://{USER}:{PASSWORD}@example.org/{PATH}", "secret": "whsec_c2hvcnQ="},
        {"url": f"ftp://example.org/{PATH}?key={QUERY}"},
        {"url": f"http://10.0.0.1/{PATH}", "min_severity": "loud"},
        {"kind": "heartbeat", "url": f"https://example.org/{PATH}"},
        {"kind": "slack", "url": f"https://example.org/services/{PATH}"},
    ]
    with api(tmp_path) as client:
        answers = [client.post("/api/v1/channels", json=body, headers=ADMIN) for body in wrong]
        said = everything_said(client, answers, caplog)
    assert {answer.status_code for answer in answers} == {422}
    assert not [word for word in (PATH, QUERY, USER, PASSWORD, "c2hvcnQ=") if word in said]
