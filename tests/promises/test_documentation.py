"""What we promise about documents: every setting, rule, command and route that exists is described, and nothing else
is."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pathlib
import re

import perfagent.wire
from perfagent.agent_config import AgentConfig
from perfagent.process.variables import KNOWN
from perfagent.wire.query import STATES
from perfagent_server.rules.handbook import tally
from perfagent_server.settings import Settings

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_every_setting_of_agent_and_server_is_documented() -> None:
    text = (DOCS / "reference" / "settings.md").read_text()
    for settings in (AgentConfig, Settings):
        for item in dataclasses.fields(settings):
            assert f"`{item.name}`" in text, f"{settings.__name__}.{item.name} is missing in docs/reference/settings.md"


def test_every_environment_variable_in_the_source_is_documented() -> None:
    text = (DOCS / "reference" / "settings.md").read_text()
    for package in ("agent", "server", "client", "dashboard"):
        for path in (ROOT / package).rglob("*.py"):
            for name in set(re.findall(r"\"(PERFAGENT_[A-Z_]*[A-Z])\"", path.read_text())):
                assert f"`{name}`" in text, (
                    f"{name} of {path.relative_to(ROOT)} is missing in docs/reference/settings.md"
                )


def test_every_variable_that_perfagent_knows_has_a_row() -> None:
    text = (DOCS / "reference" / "settings.md").read_text()
    rows = {
        name for row in re.findall(r"^\| (.*)", text, re.MULTILINE) for name in re.findall(r"`(PERFAGENT_\w+)`", row)
    }
    assert KNOWN - rows == set()


def test_every_command_is_explained_in_a_document() -> None:
    lists = {"command-line.md", "commands.md"}  # of all commands
    text = " ".join(path.read_text() for path in [ROOT / "README.md", *DOCS.rglob("*.md")] if path.name not in lists)
    for entry in importlib.metadata.entry_points(group="perfagent.commands"):
        assert re.search(rf"perfagent {entry.name}\b", text), entry.name


def test_a_table_lists_the_states_of_a_run_and_no_other() -> None:
    table = (DOCS / "reference" / "exit-codes.md").read_text().partition("| state | meaning |")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == STATES


def test_the_readme_says_how_many_rules_were_tested_and_how() -> None:
    assert tally() in " ".join((ROOT / "README.md").read_text().split())


def test_every_event_kind_is_documented() -> None:
    text = (DOCS / "reference" / "wire.md").read_text()
    for kind in perfagent.wire.EVENT_KINDS:
        assert f"`{kind}`" in text


def test_decisions_are_at_most_40_of_half_a_page() -> None:
    decisions = (DOCS / "internals" / "decisions.md").read_text().split("\n### ")[1:]
    assert len(decisions) <= 40, "join a new decision to an old one, or replace one"
    assert {text.partition("\n")[0] for text in decisions if len(text.split()) > 180} == set()


def test_every_picture_is_shown_in_a_document() -> None:
    texts = " ".join(path.read_text() for path in [*ROOT.glob("README*.md"), *DOCS.rglob("*.md")])
    pictures = [path.relative_to(DOCS).as_posix() for path in (DOCS / "images").rglob("*") if path.is_file()]
    assert [name for name in pictures if name not in texts] == []
