"""Settings: argument over environment over default, and errors that help."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfagent.config import DEFAULT_SERVER, AgentConfig
from perfagent.errors import ConfigError


def test_an_argument_wins_over_the_environment_over_the_default(monkeypatch):
    assert AgentConfig.from_env().server == DEFAULT_SERVER
    monkeypatch.setenv("PERFAGENT_SERVER", "http://monitor:8420/")
    monkeypatch.setenv("PERFAGENT_PROJECT", "language")
    settings = AgentConfig.from_env(project="vision", run_id=None)
    assert (settings.server, settings.project) == ("http://monitor:8420", "vision")


def test_the_spool_lies_in_the_state_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert AgentConfig.from_env().state_dir == tmp_path / "perfagent"
    assert AgentConfig.from_env(record="here").record == Path.cwd() / "here"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"server": "monitor:8420"}, "http://"),
        ({"server": 8420}, "address"),
        ({"project": "  "}, "project"),
        ({"run_id": "x" * 300}, "run_id"),
        ({"record": 3}, "folder"),
        ({"flush_s": 0}, "above 0"),
        ({"colour": "red"}, "unknown setting"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(options, word):
    with pytest.raises(ConfigError, match=word):
        AgentConfig.from_env(**options)


def test_disabled_is_yes_or_no(monkeypatch):
    monkeypatch.setenv("PERFAGENT_DISABLED", "1")
    assert AgentConfig.from_env().disabled
    monkeypatch.setenv("PERFAGENT_DISABLED", "maybe")
    with pytest.raises(ConfigError, match="PERFAGENT_DISABLED"):
        AgentConfig.from_env()


def test_the_key_is_not_shown():
    assert "pfa_ingest" not in repr(AgentConfig(api_key="pfa_ingest_1_x"))
