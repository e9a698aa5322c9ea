"""Sharded gradients: what the ranks send adds up to the norm of the whole gradient, and nothing counts twice."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from two_ranks import of_two_ranks

from perfagent.measure.sharding import held

pytestmark = pytest.mark.real
HERE = Path(__file__).parent
KINDS = (
    "fsdp2", "fsdp2_with_a_replicated_parameter", "hybrid", "tensor_parallel", "fsdp1", "fsdp1_with_a_replicated_layer",
    "two optimizers",
)  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank wrote: kind of sharding -> with and without the agent -> what happened."""
    return of_two_ranks(HERE / "sharded_job.py", tmp_path_factory.mktemp("sharded"))


def series(said: dict[str, Any], name: str) -> dict[int, float]:
    return {step: values[name] for step, values in said["with"]["rows"] if name in values}


def add_up(ranks: list[dict[str, Any]], steps: slice = slice(None)) -> None:
    """What the ranks measured is the norm of the whole gradient."""
    for step, norm in list(enumerate(ranks[0]["with"]["norms"], start=1))[steps]:
        parts = [series(said, "grad/local_square_sum")[step] for said in ranks]
        assert math.sqrt(sum(parts)) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("kind", [*KINDS, "clipped, fsdp1"])
def test_sharded_training_is_bit_equal_with_and_without(ranks: list[dict[str, Any]], kind: str) -> None:
    for said in (said[kind] for said in ranks):
        assert not said["with"]["failures"]
        assert [said["with"][what] for what in ("losses", "weights")] == [
            said["without"][what] for what in ("losses", "weights")
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_all_ranks_add_up_to_the_norm(ranks: list[dict[str, Any]], kind: str) -> None:
    ranks = [said[kind] for said in ranks]
    add_up(ranks)
    for step, layers in enumerate(ranks[0]["with"]["layers"], start=1):
        for layer, of_layer in layers.items():
            squares = [series(said, f"grad_square_sum/{layer}").get(step, 0.0) for said in ranks]
            assert math.sqrt(sum(squares)) == pytest.approx(of_layer, rel=1e-5, abs=1e-9)
    assert not any(series(said, "grad/norm") for said in ranks), "no rank knows the norm"
    assert all(0.0 < ratio < 1.0 for said in ranks for ratio in series(said, "update/ratio").values())


def test_fsdps_own_clipping_tells_the_norm_of_all_ranks(ranks: list[dict[str, Any]]) -> None:
    """And pieces of a flat parameter that have no names add up, too."""
    clipped = [said["clipped, fsdp1"] for said in ranks]
    for said in clipped:
        assert list(series(said, "grad/norm").values()) == pytest.approx(said["with"]["norms"], rel=1e-5)
    add_up(clipped, slice(1, None))  # measured after it was clipped
    add_up([said["fsdp1_flat"] for said in ranks])


def test_replicated_gradients_send_their_layers_once(
    ranks: list[dict[str, Any]],
) -> None:
    ranks = [said["ddp"] for said in ranks]
    for said in ranks:
        assert list(series(said, "grad/norm").values()) == pytest.approx(said["with"]["norms"], rel=1e-5)
        assert not series(said, "grad/local_square_sum")
        assert said["with"]["losses"] == said["without"]["losses"]
    assert [bool(series(said, "grad_norm/0.weight")) for said in ranks] == [True, False]


def test_pieces_of_a_flat_parameter_of_an_unknown_wrapper_count() -> None:
    piece = nn.Parameter()
    piece._fsdp_flattened = True
    assert held([piece, nn.Parameter()], 8) == (None, None)
