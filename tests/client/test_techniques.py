from __future__ import annotations

from perfagent_client.techniques import sentences


def test_each_technique_is_a_line_with_what_it_saves() -> None:
    adapter = {"method": "LORA", "rank": 8, "alpha": 16, "target_modules": ["q", "v"]}
    frozen = {"trainable_pct": 0.25, "saved_bytes": 3 * 2**29, "saved": "adam_state"}
    found = {"adapters": {"library": "peft", "default": adapter}, "frozen": frozen}
    assert sentences({"techniques": found}) == [
        "adapters: peft, default (LORA, rank 8, alpha 16, target modules q v)",
        "frozen: trainable 0.25 %; saves 1.5 GiB (gradients and moments of Adam)",
    ]
    assert sentences({"techniques": {"frozen": frozen}}, lambda key, size: f"{key} {size}") == [
        "frozen: trainable 0.25 %; adam_state 1.5 GiB"
    ]
    pruning = {  # as an older agent sent it
        "library": "torch.nn.utils.prune",
        "pruned_pct": 20.0,
        "saved_bytes": 0,
        "saved": "nothing while training",
    }
    expected = "pruning: torch.nn.utils.prune, pruned 20 %; saves nothing while training"
    assert sentences({"techniques": {"pruning": pruning}}) == [expected]
    for config in ({}, {"techniques": None}, {"techniques": "lora"}, {"techniques": {"lora": 3}}):
        assert sentences(config) == []
