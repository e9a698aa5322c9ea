"""The field's names of series, and ours."""

from __future__ import annotations

import pytest

from perfagent_server.diagnosis.names import read_as, renamed

NAMES = {
    "lr": "learning_rate train/learning_rate lr-AdamW lr-AdamW/pg1 lr/pg0 current_lr train/lr learning-rate optim/lr",
    "grad/norm": "grad_norm train/grad_norm trainer/grad_norm gnorm total_norm grad/norm optim/total_grad_norm",
    "amp/scale": "loss_scale amp/scale train/loss_scale",
    "tokens_per_s": "tokens_per_second",
}


@pytest.mark.parametrize(("ours", "theirs"), [(ours, one) for ours, names in NAMES.items() for one in names.split()])
def test_a_name_of_the_field_is_read_as_ours(ours: str, theirs: str) -> None:
    assert read_as(theirs) == ours


@pytest.mark.parametrize(
    "name", ["loss", "eval_loss", "lr-AdamW/pg2", "grad_norm/encoder.weight", "norm", "my_lr_decay", "epoch"]
)
def test_other_names_stay(name: str) -> None:
    assert read_as(name) == name


def test_no_two_series_get_one_name() -> None:
    names = ["learning_rate", "lr-AdamW", "grad_norm", "grad/norm"]
    assert renamed(names) == {
        "learning_rate": "lr", "lr-AdamW": "lr-AdamW", "grad_norm": "grad_norm", "grad/norm": "grad/norm",
    }  # fmt: skip
