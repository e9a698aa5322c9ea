"""What must stay secret of a channel: the key it signs with, and what its URL holds behind the host."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send
from builders import Receiver, until
from fastapi.testclient import TestClient

PATH_TOKEN, QUERY_TOKEN, USER, PASSWORD = (
    "Tpath0123456789abcd",
    "Tquery0123456789abc",
    "Tuser01234567",
    "Tpass0123456789ab",
)


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
    with Receiver(lambda _: status) as receiver, api(tmp_path, webhook_allow=(receiver.address,)) as client:
        host = receiver.address
        body: dict[str, Any] = {"kind": kind, "url": f"http://{host}/hooks/{PATH_TOKEN}?key={QUERY_TOKEN}"}
        if kind == "heartbeat":
            body["every_s"] = 10
        made = client.post("/api/v1/channels", json=body, headers=ADMIN)
        assert made.status_code == 201, made.text
        ident, secret = made.json()["id"], made.json()["secret"]
        answers = [
            client.patch(f"/api/v1/channels/{ident}", json={"min_severity": "critical"}, headers=ADMIN),
            client.post(f"/api/v1/channels/{ident}/test", headers=ADMIN),
        ]
        send(client, frame({"loss": [2.0, float("nan")]}), **ADMIN)
        until(lambda: receiver.deliveries)
        said = everything_said(client, answers, caplog)
    for word in (PATH_TOKEN, QUERY_TOKEN, *([secret] if secret else [])):
        assert word not in said


def test_no_secret_of_a_refused_channel_is_in_the_refusal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = [
        {"url": f"http://{USER}:{PASSWORD}@example.org/{PATH_TOKEN}", "secret": "whsec_c2hvcnQ="},
        {"url": f"ftp://example.org/{PATH_TOKEN}?key={QUERY_TOKEN}"},
        {"url": f"http://10.0.0.1/{PATH_TOKEN}", "min_severity": "loud"},
        {"kind": "heartbeat", "url": f"https://example.org/{PATH_TOKEN}"},
        {"kind": "slack", "url": f"https://example.org/services/{PATH_TOKEN}"},
    ]
    with api(tmp_path) as client:
        answers = [client.post("/api/v1/channels", json=body, headers=ADMIN) for body in wrong]
        said = everything_said(client, answers, caplog)
    assert all(answer.status_code == 422 for answer in answers), [answer.text for answer in answers]
    for word in (PATH_TOKEN, QUERY_TOKEN, USER, PASSWORD, "c2hvcnQ="):
        assert word not in said
