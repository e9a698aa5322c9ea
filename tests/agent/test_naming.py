"""Names of projects and runs: the agent refuses what the server would."""

from __future__ import annotations

import pytest

from perfagent.agent_config import AgentConfig
from perfagent.errors import ConfigError, WireError
from perfagent.naming import identity_problem
from perfagent.wire import Frame
from perfagent.wire.limits import check_frame

GOOD = ["a", "slurm-42", "x" * 128, "läuft", "a b", "user@host:1+2=3"]
BAD = ["", " ", "x" * 129, "a/b", "a\\b", "a?b", "a#b", "50%", ".", "..", "a\nb", "\ud800"]


def frame(**given):
    return Frame(**{"project": "p", "run": "r", "source": "s", "attempt": 1, "rank": 0, "seq": 1} | given)


@pytest.mark.parametrize("run", GOOD)
def test_a_run_that_the_agent_takes_is_taken_by_the_server(run):
    assert AgentConfig(run_id=run).run_id == run
    check_frame(frame(run=run))


@pytest.mark.parametrize("run", BAD)
def test_a_run_that_the_server_refuses_is_refused_at_once(run):
    with pytest.raises(WireError):
        check_frame(frame(run=run))
    with pytest.raises(ConfigError, match="run_id cannot be used: run "):
        AgentConfig(run_id=run)


def test_a_project_may_hold_what_only_an_address_may_not():
    for project in ("team/vision", "50%"):
        assert AgentConfig(project=project).project == project
        check_frame(frame(project=project))
    with pytest.raises(ConfigError, match=r"project cannot be used: .*'\\n'"):
        AgentConfig(project="a\nb")


def test_where_the_agent_is_off_no_name_is_in_the_way():
    assert AgentConfig(run_id="team/experiment", disabled=True).run_id == "team/experiment"


def test_the_problem_says_what_was_given_and_what_is_allowed():
    assert identity_problem("run", "a/b") == "run 'a/b' holds '/'; letters, digits and -_.:@+= are always fine"
    assert identity_problem("run", "x" * 200) == "run has 200 characters; 1 to 128 are allowed"
    assert identity_problem("project", "") == "project is empty; 1 to 256 characters are allowed"
