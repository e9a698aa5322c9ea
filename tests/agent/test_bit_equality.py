"""The agent changes nothing that training produces: losses, weights, batch statistics and both random states, bit by
bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent.scripts import run_script
from agent_recorded import Recording

from perfagent.delivery.spool import Spool

pytestmark = pytest.mark.real
SCRIPT = Path(__file__).parents[1] / "data" / "scripts" / "bit_equality.py"


def digest(folder: Path, *arguments: str) -> str:
    done = run_script(folder, SCRIPT, *arguments)
    assert done.returncode == 0, done
    return done.stdout.strip()


@pytest.mark.parametrize("threads", ["1", "2"])
def test_training_is_bit_equal_with_and_without_the_agent(tmp_path, threads):
    assert digest(tmp_path, threads) == digest(tmp_path, threads, "--attach")
    assert any((tmp_path / "record").rglob("*.frames")), "the agent recorded nothing: there was nothing to compare"


def test_training_is_bit_equal_with_media_in_every_step(tmp_path):
    assert digest(tmp_path, "1") == digest(tmp_path, "1", "--attach-media")
    told = Recording(tmp_path / "record").events("media")
    assert {(one["what"], one["name"]) for one in told} == {
        ("image", "samples"),
        ("histogram", "weights"),
        ("table", "table"),
    }


def test_training_is_bit_equal_with_all_looked_at_in_every_step(tmp_path):
    assert digest(tmp_path, "1") == digest(tmp_path, "1", "--attach-everything")
    (source,) = (tmp_path / "record").iterdir()
    spool = Spool.open(source, recording=True)
    names: set[str] = set()
    while (outgoing := spool.next()) is not None:
        names.update(name for group in outgoing.groups for name in group.values)
        spool.ack(outgoing.seq)
    spool.abandon()
    assert {"grad_norm/0.weight", "update_ratio/0.weight", "dead_share/2", "grad/zero_share"} <= names
