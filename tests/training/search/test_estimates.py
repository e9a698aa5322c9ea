"""The memory estimate, against what torch.profiler sees of the same training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memory_models
import pytest
import torch
from builders import job_environment
from command_line import ran
from preloaded import run
from torch import Tensor, nn
from torch.nn import functional

from perfagent_loop.estimates.adapters import quantized_bytes
from perfagent_loop.estimates.command import command
from perfagent_loop.estimates.decoder import Decoder, DecoderShape, count_read, shape_of
from perfagent_loop.estimates.memory import estimate_memory

EVERYDAY = ("mlp", "convolutions", "gpt/bf16", "gpt/checkpointed", "gpt/lora")
LONG = sorted({*memory_models.MODELS, "mlp/bf16", "convolutions/bf16", "autoencoder/bf16"} - {*EVERYDAY})


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As where it is measured: torch chooses the implementation of a convolution by the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.real
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", [*EVERYDAY, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)])
def test_the_estimate_is_within_a_tenth_of_the_profiler_s(case: str, tmp_path: Path) -> None:
    name, _, how = case.partition("/")
    model, batch, optimizer = memory_models.MODELS[name]()
    options: dict[str, Any] = {
        "bf16": {"precision": "bf16"}, "checkpointed": {"checkpointing": True}, "lora": {"optimizer": "adamw", "lora": 8},
    }.get(how, {})  # fmt: skip
    estimate = estimate_memory(model, batch, **({"optimizer": optimizer} | options))
    real = "adapters" if how == "lora" else case
    [done] = run([memory_models.__file__, real], tmp_path, [job_environment(tmp_path)])
    assert done.returncode == 0, done.stderr[-2000:]
    assert estimate.total_bytes == pytest.approx(json.loads(done.stdout.splitlines()[-1])["peak_bytes"], rel=0.10)
    assert not estimate.measured
    parameters = [*memory_models.MODELS[real.partition("/")[0]]()[0].parameters()]
    assert estimate.parameters == sum(p.numel() for p in parameters)
    assert estimate.trainable == sum(p.numel() for p in parameters if p.requires_grad)


@pytest.mark.parametrize(
    ("options", "each"),
    [
        ({}, (4, 4, 8)),
        ({"optimizer": "sgd"}, (4, None, 0)),
        ({"optimizer": "momentum"}, (4, None, 4)),
        ({"optimizer": "adamw8bit"}, (4, None, 2.04)),
        ({"precision": "bf16", "zero_stage": 2}, (2, 2, 12)),  # on one rank, nothing is divided
        # table 1 of the ZeRO paper: 2 + 2 + 12 bytes in mixed precision
        ({"precision": "bf16", "zero_stage": 1, "world_size": 4}, (2, 2, 3)),
        ({"precision": "bf16", "zero_stage": 2, "world_size": 4}, (2, 0.5, 3)),
        ({"precision": "bf16", "zero_stage": 3, "world_size": 4}, (0.5, 0.5, 3)),
    ],
)
def test_a_parameter_takes_so_many_bytes(options: dict[str, Any], each: tuple[float | None, ...]) -> None:
    """Of weights, gradients and the optimizer."""
    model, batch, _ = memory_models.mlp()
    estimate = estimate_memory(model, batch, **options)
    parts = (estimate.weights_bytes, estimate.gradients_bytes, estimate.optimizer_bytes)
    for found, expected in zip(parts, each, strict=True):
        assert expected is None or found == pytest.approx(expected * estimate.parameters, rel=0.002)
    assert estimate.bytes_per_parameter * estimate.parameters == pytest.approx(sum(parts))
    assert sum(estimate.at_peak.values()) == estimate.total_bytes


def test_quantized_weights_take_their_bits() -> None:
    with torch.device("meta"):
        model = Decoder(DecoderShape(layers=2, width=256, heads=2, vocabulary=512))
        batch = (torch.zeros(2, 32, dtype=torch.int64),) * 2
    plain, int8, nf4 = (
        estimate_memory(model, batch, lora=4, quantize=kind, checkpointing=kind == "nf4", device="cpu")
        for kind in (None, "int8", "nf4")
    )
    matrices = sum(m.weight.numel() for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "head")
    assert plain.weights_bytes - int8.weights_bytes == pytest.approx(3 * matrices, rel=0.01)
    assert plain.weights_bytes - nf4.weights_bytes == pytest.approx((4 - 4.127 / 8) * matrices, rel=0.001)
    assert nf4.trainable == int8.trainable == plain.trainable
    assert quantized_bytes(64 * 256 * 4, 4, "nf4") * 8 / (64 * 256 * 4) == pytest.approx(4.127, abs=0.001)


def test_checkpointing_trades_activations_for_nothing_else() -> None:
    model, batch, optimizer = memory_models.gpt()
    whole, part = (estimate_memory(model, batch, optimizer=optimizer, checkpointing=how) for how in (False, "all"))
    assert part.activations_bytes < 0.5 * whole.activations_bytes
    assert part.state_bytes == whole.state_bytes
    assert part.total_bytes < whole.total_bytes
    assert whole.total_bytes - whole.first_step_bytes == whole.optimizer_bytes  # the state comes last
    twice = estimate_memory(model, batch, optimizer=optimizer, grad_accum=2)  # keeps gradients through the forward pass
    assert twice.total_bytes - whole.total_bytes == pytest.approx(whole.gradients_bytes, rel=0.05)


def test_a_model_of_seven_billion_parameters_needs_no_memory() -> None:
    shape = shape_of(count_read("7B"))
    assert 12 * shape.layers * shape.width**2 + 64000 * shape.width == pytest.approx(7e9, rel=0.02)
    assert [count_read(text) for text in ("350m", "1.3e9", "12")] == [350 * 10**6, 1_300_000_000, 12]
    tokens = torch.empty(1, 128, dtype=torch.int64, device="meta")
    model = Decoder(DecoderShape(layers=4, width=11392, heads=89))  # as many parameters in few layers: a quick test
    estimate = estimate_memory(model, (tokens, tokens), optimizer="sgd", precision="bf16", zero_stage=3, world_size=8)
    assert estimate.parameters == pytest.approx(7e9, rel=0.03)
    assert estimate.state_bytes == pytest.approx(8 * 7e9 / 8, rel=0.03)


def test_models_that_read_values_or_answer_a_loss_are_estimated() -> None:
    class Gated(nn.Sequential):
        """Reads a value back in the middle, as routers and beams do."""

        def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
            if reads and features.abs().max().item() == 0:
                raise ValueError("nothing to learn")
            return {"loss": functional.cross_entropy(super().forward(features), labels)}

    def state() -> list[Tensor]:
        return [torch.get_rng_state(), *(tensor.clone() for tensor in model.state_dict().values())]

    batch = {"features": torch.randn(8, 32), "labels": torch.randint(0, 4, (8,))}
    model = Gated(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    parameters = [*model.parameters()]
    for reads in (True, False):
        before = state()
        estimate = estimate_memory(model, batch)
        assert (estimate.measured, estimate.gradients_bytes) == (reads, sum(weight.nbytes for weight in parameters))
        assert all(map(torch.equal, before, state())), "all is as it was"
        assert not any(weight.grad is not None for weight in parameters)


PAIR = "import torch\ndef made():\n    return torch.nn.Linear(8, 2), torch.zeros(4, 8)\n"
TABLE = "--layers 2 --width 128 --heads 2 --vocabulary 256 --sequence 64 --lora 4"
SHAPE = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 128, "n_positions": 64}


@pytest.mark.parametrize(
    ("words", "figure", "value"),
    [
        ("pair.py:made --optimizer sgd", "weights_bytes", 4 * 18),
        pytest.param("--config . --sequence 32 --lora 4", "trainable", 8192, marks=pytest.mark.frameworks),
    ],
)
def test_the_command_prints_a_table_or_json(
    words: str,
    figure: str,
    value: int,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pair.py").write_text(PAIR)
    Path("config.json").write_text(json.dumps(SHAPE))
    assert ran(command, *words.split(), "--json") == 0
    assert json.loads(capsys.readouterr().out)[figure] == value
    assert ran(command, *TABLE.split()) == 0
    shown = capsys.readouterr().out
    for part in ("a decoder of 2 layers", "in the backward pass", "LoRA of rank 4 beside 14 linear layers"):
        assert part in shown
