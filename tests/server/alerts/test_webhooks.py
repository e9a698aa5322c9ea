"""Signatures, checked by the reference library of Standard Webhooks; and the body."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from perfagent.errors import ConfigError
from perfagent.wire import Finding
from perfagent_server.alerts import webhooks


def test_each_secret_of_a_rotation_verifies_and_no_other() -> None:
    old, new, body = webhooks.new_secret(), webhooks.new_secret(), b'{"a":"\xc3\xa4"}'
    headers = webhooks.headers(f"{new} {old}", "msg_1", int(time.time()), body)
    for key in (old, new):
        Webhook(key).verify(body, headers)
    for key, content in ((old, b'{"a":2}'), (webhooks.new_secret(), body)):
        with pytest.raises(WebhookVerificationError):
            Webhook(key).verify(content, headers)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_AAAA", "abc", "whsec_" + "A" * 200, "whsec_ü"])
def test_a_weak_or_malformed_secret_is_refused(secret: str) -> None:
    with pytest.raises(ConfigError):
        webhooks.secret_bytes(secret)


def body_of(**evidence: Any) -> bytes:
    found = Finding(
        rule="nonfinite_loss", severity="critical", message="The loss became NaN", since_step=7, since="2026-01-01T00:00:00.000Z",
        ranks=[1], evidence=evidence, fix="stop",
    )  # fmt: skip
    return webhooks.alert_body(
        "alert.firing", 0.0, alert="al_1", state="firing", finding=found, run="r", run_name="gpt", project="p", url="http://x/run/r"
    )  # fmt: skip


def test_body_is_that_of_the_interface_and_spells_out_numbers() -> None:
    body = json.loads(body_of(value=math.nan, raw=b"\x00", text="\ud800"))
    assert (body["type"], body["timestamp"]) == ("alert.firing", "1970-01-01T00:00:00.000Z")
    data = body["data"]
    assert (set(body), set(data)) == (
        {"type", "timestamp", "data"}, {"alert", "run", "run_name", "project", "evidence", "fix", "url"},
    )  # fmt: skip
    assert set(data["alert"]) >= {"id", "rule", "severity", "message", "since", "ranks"}
    assert (data["evidence"]["value"], data["url"]) == ("NaN", "http://x/run/r")


def test_a_body_stays_small_whatever_the_evidence() -> None:
    raw = body_of(big=["x" * 100] * 5000, small=1)
    assert len(raw) < 64 * 1024
    assert json.loads(raw)["data"]["evidence"] == {"small": 1}
