from __future__ import annotations

from pathlib import Path

import pytest
from api_builders import listening
from commands import perfagent as command

import perfagent
from perfagent_client.techniques import sentences

LORA = {
    "adapters": {
        "library": "peft",
        "default": {"method": "LORA", "rank": 8, "alpha": 16, "target_modules": ["q", "v"]},
    },
    "frozen": {"trainable_pct": 0.25, "saved_bytes": 3 * 2**29, "saved": "gradients and moments of Adam"},
}


def test_each_technique_is_a_line_with_what_it_saves() -> None:
    assert sentences({"techniques": LORA}) == [
        "adapters: peft, default (LORA, rank 8, alpha 16, target modules q v)",
        "frozen: trainable 0.25 %; saves 1.5 GiB (gradients and moments of Adam)",
    ]
    pruning = {
        "library": "torch.nn.utils.prune",
        "pruned_pct": 20.0,
        "saved_bytes": 0,
        "saved": "nothing while training",
    }
    expected = "pruning: torch.nn.utils.prune, pruned 20 %; saves nothing while training"
    assert sentences({"techniques": {"pruning": pruning}}) == [expected]


@pytest.mark.parametrize("config", [{}, {"techniques": None}, {"techniques": "lora"}, {"techniques": {"lora": 3}}])
def test_what_is_of_another_kind_is_left_out(config: dict[str, object]) -> None:
    assert sentences(config) == []


def test_show_prints_what_was_recognized(tmp_path: Path) -> None:
    with listening(tmp_path) as server:
        run = perfagent.init(name="tuned", config={"techniques": LORA}, server=server.url)
        assert run is not None
        run.finish()
        shown = command(tmp_path, "show", "tuned", PERFAGENT_SERVER=server.url)
    assert shown.returncode == 0, shown.stderr
    assert "frozen: trainable 0.25 %; saves 1.5 GiB (gradients and moments of Adam)" in shown.stdout
