"""Settings come from the environment in one place, and say what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfagent.errors import ConfigError
from perfagent_server.settings import Settings


def test_every_field_is_read_from_its_variable() -> None:
    environ = {
        "PERFAGENT_DATA": "/somewhere", "PERFAGENT_PORT": "9000", "PERFAGENT_AUTH": "required",
        "PERFAGENT_INSECURE_NO_AUTH": "1", "PERFAGENT_ALLOWED_HOSTS": "a.example, b.example",
        "PERFAGENT_WEBHOOK_ALLOW": "10.0.0.0/8,hook.lan:9000", "PERFAGENT_READ_TIMEOUT_S": "2.5",
        "PERFAGENT_SAMPLES_DAYS": "30", "PERFAGENT_ADMIN_TOKEN": "x" * 32,
    }  # fmt: skip
    settings = Settings.from_env(environ)
    assert (settings.data, settings.port, settings.auth) == (Path("/somewhere"), 9000, "required")
    assert settings.insecure_no_auth
    assert settings.allowed_hosts == ("a.example", "b.example")
    assert settings.webhook_allow == ("10.0.0.0/8", "hook.lan:9000")
    assert (settings.read_timeout_s, settings.samples_days, settings.runs_days) == (2.5, 30.0, None)
    assert "x" * 32 not in repr(settings)
    assert Settings.from_env(environ, port=1234).port == 1234, "an argument wins, unless it is absent"
    assert Settings.from_env(environ, port=None).port == 9000
    assert Settings.from_env({"XDG_DATA_HOME": "/x"}).data == Path("/x/perfagent")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "web"), ("PORT", "70000"), ("AUTH", "none"), ("INSECURE_NO_AUTH", "maybe"), ("ADMIN_TOKEN", "short"),
        ("READ_TIMEOUT_S", "nan"), ("RUNS_DAYS", "0"), ("EVENTS_DAYS", "-1"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_used_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as error:
        Settings.from_env({f"PERFAGENT_{name}": value})
    assert len(str(error.value)) > 20


@pytest.mark.parametrize(
    ("host", "auth", "insecure", "is_open"),
    [
        ("127.0.0.1", "auto", False, True), ("localhost", "auto", False, True), ("::1", "auto", False, True),
        ("127.0.0.1", "required", False, False), ("0.0.0.0", "auto", False, False), ("::", "auto", False, False),
        ("192.168.1.5", "auto", False, False), ("0.0.0.0", "auto", True, True), ("a.example", "auto", False, False),
    ],
)  # fmt: skip
def test_only_loopback_or_an_explicit_wish_is_open(host: str, auth: str, insecure: bool, is_open: bool) -> None:
    settings = Settings(data=Path("/x"), host=host, auth=auth, insecure_no_auth=insecure)  # type: ignore[arg-type]
    assert settings.open_access is is_open


@pytest.mark.parametrize(
    ("host", "found_at"),
    [("0.0.0.0", "http://127.0.0.1:8420"), ("::", "http://[::1]:8420"), ("::1", "http://[::1]:8420")],
)
def test_addresses_can_be_opened(host: str, found_at: str) -> None:
    assert Settings(data=Path("/x"), host=host).url == found_at
    public = Settings(data=Path("/x"), host=host, public_url="https://a.example/")
    assert (public.url, public.local_url) == ("https://a.example", found_at)
