"""Signatures, checked by the reference library of Standard Webhooks; and the body."""

from __future__ import annotations

import json
import math
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError

from perfagent.errors import ConfigError
from perfagent.wire import Finding
from perfagent_server.alerts import webhooks


def _now() -> int:
    return int(datetime.now().astimezone().timestamp())


@given(body=st.binary(max_size=300).map(lambda raw: json.dumps(raw.hex()).encode()), ident=st.uuids().map(str))
def test_the_reference_library_accepts_what_we_sign(body: bytes, ident: str) -> None:
    secret = webhooks.new_secret()
    Webhook(secret).verify(body, webhooks.headers(secret, ident, _now(), body))


def test_a_changed_body_or_another_secret_is_refused() -> None:
    secret, body = webhooks.new_secret(), b'{"a":1}'
    headers = webhooks.headers(secret, "msg_1", _now(), body)
    for key, content in ((secret, b'{"a":2}'), (webhooks.new_secret(), body)):
        with pytest.raises(WebhookVerificationError):
            Webhook(key).verify(content, headers)


def test_while_a_secret_is_rotated_both_verify() -> None:
    old, new, body = webhooks.new_secret(), webhooks.new_secret(), b"{}"
    headers = webhooks.headers(f"{new} {old}", "msg_1", _now(), body)
    for key in (old, new):
        Webhook(key).verify(body, headers)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_AAAA", "abc", "whsec_" + "A" * 200, "whsec_ü"])
def test_a_weak_or_malformed_secret_is_refused(secret: str) -> None:
    with pytest.raises(ConfigError):
        webhooks.secret_bytes(secret)


def test_the_body_is_what_the_interface_says_with_non_finite_numbers_spelled_out() -> None:
    found = Finding(
        rule="nonfinite_loss", severity="critical", message="The loss became NaN", since_step=7, since="2026-01-01T00:00:00.000Z",
        ranks=[1], evidence={"value": math.nan, "raw": b"\x00", "text": "\ud800"}, fix="stop",
    )  # fmt: skip
    raw = webhooks.alert_body(
        "alert.firing",
        0.0,
        alert="al_1",
        state="firing",
        finding=found,
        run="r",
        run_name="gpt",
        project="p",
        url="http://x/run/r",
    )
    body = json.loads(raw)
    assert body["type"] == "alert.firing"
    assert body["timestamp"] == "1970-01-01T00:00:00.000Z"
    data = body["data"]
    assert set(data) >= {"alert", "run", "run_name", "project", "evidence", "fix", "url"}
    assert set(data["alert"]) >= {"id", "rule", "severity", "message", "since", "ranks"}
    assert data["evidence"]["value"] == "NaN"
    assert data["url"] == "http://x/run/r"


def test_a_body_stays_small_whatever_the_evidence() -> None:
    found = Finding(rule="r", severity="info", message="m", evidence={"big": ["x" * 100] * 5000, "small": 1})
    raw = webhooks.alert_body(
        "alert.firing", 0.0, alert="a", state="firing", finding=found, run="r", run_name="r", project="p", url=""
    )
    assert len(raw) < 64 * 1024
    assert json.loads(raw)["data"]["evidence"] == {"small": 1}
