"""Settings: argument over environment over default, and errors that help."""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from functools import partial
from pathlib import Path

import pytest

from perfagent.agent_config import AgentConfig
from perfagent.endpoint.addresses import DEFAULT_SERVER
from perfagent.errors import ConfigError


def test_an_argument_wins_over_the_environment_over_the_default(monkeypatch):
    assert AgentConfig.from_env().server == DEFAULT_SERVER
    monkeypatch.setenv("PERFAGENT_SERVER", "http://monitor:8420/")
    monkeypatch.setenv("PERFAGENT_PROJECT", "language")
    settings = AgentConfig.from_env(project="vision", run_id=None)
    assert (settings.server, settings.project) == ("http://monitor:8420", "vision")


@pytest.mark.parametrize(
    ("options", "word"), [({"server": 8420}, "address"), ({"record": 3}, "folder"), ({"flush_s": 0}, "above 0")]
)
def test_a_value_that_cannot_be_used_is_named(options, word):
    with pytest.raises(ConfigError, match=word):
        AgentConfig.from_env(**options)


@pytest.mark.parametrize(
    "place", ["127.0.0.1:84200", "127.0.0.1:0", "[::1", "monitor:1/?x=1", "monitor:1/a b", "monitor:1/größe"]
)
def test_address_that_cannot_be_reached_is_refused(place, monkeypatch):
    monkeypatch.setenv("PERFAGENT_SERVER", f"http://{place}")
    with pytest.raises(ConfigError, match="such as http://127") as raised:
        AgentConfig.from_env()
    assert repr(f"http://{place}") in str(raised.value), "what was given"


def test_a_refused_setting_shows_no_password_or_key():
    for server in ("http://user:hunter2@[::1", "http://user:hunter2@monitor:84200", "http://user:hun#ter2@monitor"):
        with pytest.raises(ConfigError) as raised:
            AgentConfig(server=server)
        assert "hun" not in str(raised.value)
    for key in ("pfa_ingest\n_secret", "pfä_ingest_secret", 5):
        with pytest.raises(ConfigError, match="api_key must be") as raised:
            AgentConfig(api_key=key)
        assert "secret" not in str(raised.value)
    assert "pfa_ingest" not in repr(AgentConfig(api_key="pfa_ingest_1_x"))


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """A container that runs under a number without an entry in passwd: nobody knows where home is."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)

    def unknown(_):
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"perfagent-{os.getuid()}"


def test_state_without_a_home_is_in_a_private_temporary_folder(homeless, monkeypatch):
    before = os.umask(0)
    try:
        assert AgentConfig.from_env().state_dir == homeless
    finally:
        os.umask(before)
    assert stat.S_IMODE(homeless.stat().st_mode) == 0o700
    assert AgentConfig.from_env().state_dir == homeless, "and the next process finds it"
    monkeypatch.setenv("XDG_STATE_HOME", "~/state")
    assert AgentConfig.from_env().state_dir == homeless


def test_a_temporary_folder_that_others_may_use_is_refused(homeless, tmp_path):
    for prepare in (partial(homeless.mkdir, mode=0o755), homeless.rmdir, partial(homeless.symlink_to, tmp_path)):
        prepare()
        if homeless.exists():
            with pytest.raises(ConfigError, match="XDG_STATE_HOME"):
                AgentConfig.from_env()


def test_file_is_no_folder_to_record_into(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("")
    with pytest.raises(ConfigError, match=rf"record must be a folder, and '{file}' is a file"):
        AgentConfig.from_env(record=file / "of/a/run")
    with pytest.raises(ConfigError, match="record must be a folder"):
        AgentConfig.from_env(record="~nobody9/x")


def test_value_of_the_environment_is_blamed_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFAGENT_SERVER", "monitor:8420")
    monkeypatch.setenv("PERFAGENT_PROJECT", "x" * 300)
    with pytest.raises(ConfigError, match=r"^PERFAGENT_SERVER: server must be .* not 'monitor:8420'$"):
        AgentConfig.from_env()
    with pytest.raises(ConfigError, match=r"^PERFAGENT_PROJECT: project cannot be used"):
        AgentConfig.from_env(server="http://monitor:8420")
    with pytest.raises(ConfigError, match=r"^server must be .* not 'foo'$"):
        AgentConfig.from_env(server="foo", project="mine")


@pytest.mark.parametrize(
    ("option", "variable", "default"),
    [
        ("disabled", "PERFAGENT_DISABLED", False),
        ("capture_logs", "PERFAGENT_CAPTURE_LOGS", True),
        ("tune_malloc", "PERFAGENT_MALLOC", True),
    ],
)
def test_switch_is_yes_or_no(option: str, variable: str, default: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert getattr(AgentConfig.from_env(), option) is default
    monkeypatch.setenv(variable, "0" if default else "1")
    assert getattr(AgentConfig.from_env(), option) is not default
    assert getattr(AgentConfig.from_env(**{option: default}), option) is default, "an argument wins"
    monkeypatch.setenv(variable, "maybe")
    with pytest.raises(ConfigError, match=f"{variable} must be 1 or 0, not 'maybe'"):
        AgentConfig.from_env()
    monkeypatch.delenv(variable)
    if option != "disabled":  # where the agent is off, no other value is in the way
        with pytest.raises(ConfigError, match=f"{option} must be True or False, not 'no'"):
            AgentConfig.from_env(**{option: "no"})
