"""Sharded gradients: what the ranks send adds up to the norm of the whole gradient, and nothing counts twice."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from two_ranks import of_two_ranks

from perfagent.measure.sharding import Held, held

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


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_all_ranks_add_up_to_the_norm(ranks: list[dict[str, Any]], kind: str) -> None:
    ranks = [said[kind] for said in ranks]
    assert all(not said["with"]["failures"] for said in ranks)
    true = ranks[0]["with"]
    for step, norm in enumerate(true["norms"], start=1):
        parts = [series(said, "grad/local_square_sum")[step] for said in ranks]
        assert math.sqrt(sum(parts)) == pytest.approx(norm, rel=1e-5)
        for layer, of_layer in true["layers"][step - 1].items():
            squares = [series(said, f"grad_square_sum/{layer}").get(step, 0.0) for said in ranks]
            assert math.sqrt(sum(squares)) == pytest.approx(of_layer, rel=1e-5, abs=1e-9)
    assert not any(series(said, "grad/norm") for said in ranks), "no rank knows the norm"
    assert all(0.0 < ratio < 1.0 for said in ranks for ratio in series(said, "update/ratio").values())


def test_fsdps_own_clipping_tells_the_norm_of_all_ranks(ranks: list[dict[str, Any]]) -> None:
    """And pieces of a flat parameter that have no names add up, too."""
    for said in (said["clipped, fsdp1"] for said in ranks):
        assert not said["with"]["failures"]
        assert list(series(said, "grad/norm").values()) == pytest.approx(said["with"]["norms"], rel=1e-5)
    pieces = [series(said["clipped, fsdp1"], "grad/local_square_sum") for said in ranks]
    for step, norm in list(enumerate(ranks[0]["clipped, fsdp1"]["with"]["norms"], start=1))[1:]:
        assert math.sqrt(sum(piece[step] for piece in pieces)) == pytest.approx(norm, rel=1e-5), (
            "measured after it was clipped"
        )
    for step, norm in enumerate(ranks[0]["fsdp1_flat"]["with"]["norms"], start=1):
        parts = [series(said["fsdp1_flat"], "grad/local_square_sum")[step] for said in ranks]
        assert math.sqrt(sum(parts)) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("kind", [*KINDS, "clipped, fsdp1"])
def test_sharded_training_is_bit_equal_with_and_without(ranks: list[dict[str, Any]], kind: str) -> None:
    for said in ranks:
        assert said[kind]["with"]["losses"] == said[kind]["without"]["losses"]
        assert said[kind]["with"]["weights"] == said[kind]["without"]["weights"]


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
    assert held([piece, nn.Parameter()], 8) == Held(None, None)
