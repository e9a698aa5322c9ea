"""Names of projects and runs: the agent refuses what the server would."""

from __future__ import annotations

import pytest

from perfagent.agent_config import AgentConfig
from perfagent.errors import ConfigError, WireError
from perfagent.wire import Frame
from perfagent.wire.limits import check_frame

GOOD = ["a", "slurm-42", "x" * 128, "läuft", "a b", "user@host:1+2=3"]
BAD = ["", " ", "x" * 129, "a/b", "a\\b", "a?b", "a#b", "50%", ".", "..", "a\nb", "\ud800"]


def frame(**given):
    return Frame(**{"project": "p", "run": "r", "source": "s", "attempt": 1, "rank": 0, "seq": 1} | given)


def test_names_that_the_agent_and_the_server_take_are_the_same():
    for run in GOOD:
        assert AgentConfig(run_id=run).run_id == run
        check_frame(frame(run=run))
    for run in BAD:
        with pytest.raises(WireError):
            check_frame(frame(run=run))
        with pytest.raises(ConfigError, match="run_id cannot be used: run "):
            AgentConfig(run_id=run)
    assert AgentConfig(run_id=BAD[-1], disabled=True).run_id == BAD[-1], "where the agent is off none is in the way"


def test_a_project_may_hold_what_only_an_address_may_not():
    for project in ("team/vision", "50%"):
        assert AgentConfig(project=project).project == project
        check_frame(frame(project=project))
    with pytest.raises(ConfigError, match=r"project cannot be used: .*'\\n'"):
        AgentConfig(project="a\nb")
