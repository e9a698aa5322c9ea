"""What is told of steps of other sizes than those that were counted, and their share of a device's peak."""

from __future__ import annotations

import pytest
import torch

from perfagent.measure.batches.size import Inputs
from perfagent.probes.flops.op_formulas import Counted
from perfagent.probes.flops.step_flops import StepFlops

TEXT, PICTURES = (4, 40), (4, 0, 3, 64, 64)


@pytest.fixture
def inputs():
    return Inputs()


@pytest.fixture
def known(inputs):
    """known(size): the operations of one size are counted, 100 in products and 10 in attention."""

    def make(size=TEXT, products=100.0, attention=10.0, device=None, kind=""):
        flops = StepFlops(lambda: device, {size: Counted(products=products, attention=attention)}, seen=inputs)
        flops.kind = kind
        return flops

    return make


def told(flops, samples, tokens, seconds=2.0):
    values = {}
    flops.add(1, values, samples, tokens, seconds)
    return values


@pytest.mark.parametrize(
    ("samples", "tokens", "flops_per_s"),
    [
        (4, 40, 55.0), (2, 20, 27.5), (4, 80, (200 + 40) / 2),  # longer samples cost attention squared
        (4, 0, None), (0, 0, None),
    ],
)  # fmt: skip
def test_text_of_other_sizes_is_scaled(known, samples, tokens, flops_per_s):
    assert told(known(), samples, tokens).get("flops_per_s") == pytest.approx(flops_per_s)


def test_pictures_are_scaled_to_their_own_resolution_only(known, inputs):
    flops = known(PICTURES)
    inputs.changes.append((0, (3, 64, 64)))
    assert told(flops, 8, 0)["flops_per_s"] == pytest.approx(110.0)
    inputs.changes.append((1, (3, 16, 16)))
    assert [flops.of(step, 4, 0) for step in (2, 4)] == [None, None]
    assert flops.wants()
    inputs.changes.append((4, None))
    assert told(flops, 4, 0) == {}
    assert not flops.wants(), "an input of unknown shape is never counted"


def test_steps_are_told_by_the_shape_they_had(known, inputs):
    flops = known((4, 0, 9))
    inputs.changes.extend([(0, (9,)), (5, (3,)), (7, (9,))])  # steps 6 and 7 have the other one
    assert [step for step in range(1, 11) if flops.of(step, 4, 0)] == [1, 2, 3, 4, 5, 8, 9, 10]


@pytest.mark.parametrize(
    ("name", "kind", "tflops", "mfu"),
    [
        ("NVIDIA H200", "bfloat16", 989.4, 0.5),
        ("NVIDIA H200", "bfloat16", 2 * 989.4, 1.0),
        ("NVIDIA H200", "float32", 989.4, None),  # more than the peak is not believed
        ("NVIDIA H200", "", 1.0, None),
        ("NVIDIA Unheard Of", "bfloat16", 1.0, None),
    ],
)
def test_a_known_device_has_a_share_of_its_peak(known, monkeypatch, name, kind, tflops, mfu):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    values = told(known(products=tflops * 1e12, attention=0.0, device=0, kind=kind), *TEXT)
    assert values["flops_per_s"] == tflops * 1e12 / 2
    assert values.get("mfu") == pytest.approx(mfu)
