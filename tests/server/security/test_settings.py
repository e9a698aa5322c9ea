"""Settings come from the environment in one place, and say what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfagent.errors import ConfigError
from perfagent_server.settings import Settings


def test_every_field_is_read_from_its_variable() -> None:
    environ = {
        "PERFAGENT_DATA": "/somewhere",
        "PERFAGENT_PORT": "9000",
        "PERFAGENT_AUTH": "required",
        "PERFAGENT_INSECURE_NO_AUTH": "1",
        "PERFAGENT_ALLOWED_HOSTS": "a.example, b.example",
        "PERFAGENT_WEBHOOK_ALLOW": "10.0.0.0/8,hook.lan:9000",
        "PERFAGENT_READ_TIMEOUT_S": "2.5",
        "PERFAGENT_SAMPLES_DAYS": "30",
        "PERFAGENT_ADMIN_TOKEN": "x" * 32,
    }
    settings = Settings.from_env(environ)
    assert (settings.data, settings.port, settings.auth, settings.insecure_no_auth) == (
        Path("/somewhere"),
        9000,
        "required",
        True,
    )
    assert settings.allowed_hosts == ("a.example", "b.example")
    assert settings.webhook_allow == ("10.0.0.0/8", "hook.lan:9000")
    assert settings.read_timeout_s == 2.5
    assert (settings.samples_days, settings.runs_days) == (30.0, None)
    assert "x" * 32 not in repr(settings)


def test_an_argument_wins_over_the_environment_unless_it_is_absent() -> None:
    assert Settings.from_env({"PERFAGENT_PORT": "9000"}, port=1234).port == 1234
    assert Settings.from_env({"PERFAGENT_PORT": "9000"}, port=None).port == 9000


def test_data_lies_in_the_users_data_folder() -> None:
    assert Settings.from_env({"XDG_DATA_HOME": "/x"}).data == Path("/x/perfagent")
    assert Settings.from_env({}).data == Path("~/.local/share/perfagent").expanduser()


@pytest.mark.parametrize(
    "environ",
    [
        {"PERFAGENT_PORT": "web"},
        {"PERFAGENT_PORT": "70000"},
        {"PERFAGENT_AUTH": "none"},
        {"PERFAGENT_INSECURE_NO_AUTH": "maybe"},
        {"PERFAGENT_ADMIN_TOKEN": "short"},
        {"PERFAGENT_READ_TIMEOUT_S": "nan"},
        {"PERFAGENT_RUNS_DAYS": "0"},
        {"PERFAGENT_EVENTS_DAYS": "-1"},
    ],
)
def test_a_value_that_cannot_be_used_is_named(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        Settings.from_env(environ)
    assert len(str(error.value)) > 20


@pytest.mark.parametrize(
    ("host", "auth", "insecure", "is_open"),
    [
        ("127.0.0.1", "auto", False, True),
        ("localhost", "auto", False, True),
        ("::1", "auto", False, True),
        ("127.0.0.1", "required", False, False),
        ("0.0.0.0", "auto", False, False),
        ("::", "auto", False, False),
        ("192.168.1.5", "auto", False, False),
        ("0.0.0.0", "auto", True, True),
        ("a.example", "auto", False, False),
    ],
)
def test_only_loopback_or_an_explicit_wish_is_open(host: str, auth: str, insecure: bool, is_open: bool) -> None:
    settings = Settings(data=Path("/x"), host=host, auth=auth, insecure_no_auth=insecure)  # type: ignore[arg-type]
    assert settings.open_access is is_open


def test_addresses_can_be_opened() -> None:
    assert Settings(data=Path("/x"), host="0.0.0.0").url == "http://127.0.0.1:8420"
    assert Settings(data=Path("/x"), host="::1").url == "http://[::1]:8420"
    assert Settings(data=Path("/x"), public_url="https://a.example/").url == "https://a.example"
    for host, found_at in (("0.0.0.0", "http://127.0.0.1:8420"), ("::", "http://[::1]:8420")):
        settings = Settings(data=Path("/x"), host=host, public_url="https://a.example/")
        assert settings.local_url == found_at, "where jobs and commands of this machine find it"
