"""The memory estimate, against what torch.profiler sees of the same training."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import job_environment
from command_line import ran
from preloaded import run
from torch import Tensor, nn
from torch.nn import functional

from perfagent.errors import ConfigError
from perfagent_loop.estimates.adapters import quantized_bytes
from perfagent_loop.estimates.command import command
from perfagent_loop.estimates.decoder import Decoder, DecoderShape, count_read, shape_of
from perfagent_loop.estimates.memory import MemoryEstimate, estimate_memory

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import memory_models as trainings  # noqa: E402 - what is measured in a process of its own

CASES = (
    *trainings.MODELS, "gpt/bf16", "mlp/bf16", "convolutions/bf16", "autoencoder/bf16", "gpt/checkpointed",
)  # fmt: skip
EVERYDAY = ("mlp", "convolutions", "gpt", "adapters", "gpt/bf16", "gpt/checkpointed")


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Bytes at the peak, seen by torch.profiler in a process that does nothing else; of the cases that tests ask
    for."""
    folder = tmp_path_factory.mktemp("measured")
    names = {item.name for item in request.session.items}
    cases = [case for case in CASES if case in EVERYDAY or any(name.endswith(f"[{case}]") for name in names)]
    [done] = run([str(HERE / "memory_models.py"), *cases], folder, [job_environment(folder)])
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line["peak_bytes"] for line in lines}


def estimated(case: str) -> MemoryEstimate:
    name, _, how = case.partition("/")
    model, batch, optimizer = trainings.MODELS[name]()
    precision = "bf16" if how == "bf16" else "fp32"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as where it was measured: torch chooses the implementation of a convolution by them
    try:
        checkpointing = how == "checkpointed"
        return estimate_memory(model, batch, optimizer=optimizer, precision=precision, checkpointing=checkpointing)  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.real
@pytest.mark.parametrize(
    "case", [case if case in EVERYDAY else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
def test_the_estimate_is_within_a_tenth_of_the_profiler_s(case: str, measured: dict[str, int]) -> None:
    estimate = estimated(case)
    assert estimate.total_bytes == pytest.approx(measured[case], rel=0.10)
    assert not estimate.measured


@pytest.mark.real
def test_lora_that_is_thought_of_is_the_lora_that_is_trained(measured: dict[str, int]) -> None:
    model, batch, _ = trainings.gpt()
    estimate = estimate_memory(model, batch, optimizer="adamw", lora=8)
    assert estimate.total_bytes == pytest.approx(measured["adapters"], rel=0.10)
    real, _, _ = trainings.adapters()
    assert estimate.parameters == sum(p.numel() for p in real.parameters())
    assert estimate.trainable == sum(p.numel() for p in real.parameters() if p.requires_grad)


def test_the_parts_are_those_of_the_rule_of_sixteen_bytes() -> None:
    model, batch, _ = trainings.mlp()
    numbers = sum(p.numel() for p in model.parameters())
    estimate = estimate_memory(model, batch, optimizer="adamw")
    assert estimate.weights_bytes == estimate.gradients_bytes == 4 * numbers
    assert estimate.optimizer_bytes == pytest.approx(8 * numbers, rel=0.001)  # and a count of steps for each parameter
    assert estimate.bytes_per_parameter == pytest.approx(16, rel=0.001)
    assert sum(estimate.at_peak.values()) == estimate.total_bytes
    assert estimate_memory(model, batch, optimizer="sgd").optimizer_bytes == 0
    assert estimate_memory(model, batch, optimizer="momentum").optimizer_bytes == 4 * numbers
    assert estimate_memory(model, batch, optimizer="adamw8bit").optimizer_bytes == pytest.approx(2 * numbers, rel=0.05)


def test_zero_divides_what_each_stage_says() -> None:
    model, batch, _ = trainings.mlp()
    numbers = sum(p.numel() for p in model.parameters())
    stages = [estimate_memory(model, batch, precision="bf16", zero_stage=stage, world_size=4) for stage in (0, 1, 2, 3)]
    states = [(one.weights_bytes, one.gradients_bytes, one.optimizer_bytes) for one in stages]
    near = [
        pytest.approx(tuple(numbers * each for each in of), rel=0.001)
        for of in ((4, 4, 8), (2, 2, 3), (2, 0.5, 3), (0.5, 0.5, 3))
    ]
    assert states == near  # table 1 of the ZeRO paper: 2 + 2 + 12 bytes in mixed precision
    totals = [one.total_bytes for one in stages]
    assert totals == sorted(totals, reverse=True)
    alone = estimate_memory(model, batch, precision="bf16", zero_stage=2, world_size=1)
    assert alone.bytes_per_parameter == pytest.approx(16, rel=0.001)


def test_quantized_weights_take_their_bits() -> None:
    shape = DecoderShape(layers=2, width=256, heads=2, vocabulary=512)
    batch = (torch.zeros(2, 32, dtype=torch.int64),) * 2
    plain, int8, nf4 = (
        estimate_memory(Decoder(shape), batch, lora=4, quantize=kind, device="cpu") for kind in (None, "int8", "nf4")
    )
    matrices = sum(
        m.weight.numel() for n, m in Decoder(shape).named_modules() if isinstance(m, nn.Linear) and n != "head"
    )
    assert plain.weights_bytes - int8.weights_bytes == pytest.approx(3 * matrices, rel=0.01)
    assert plain.weights_bytes - nf4.weights_bytes == pytest.approx((4 - 4.127 / 8) * matrices, rel=0.001)
    assert nf4.trainable == int8.trainable == plain.trainable
    assert quantized_bytes(64 * 256 * 4, 4, "nf4") * 8 / (64 * 256 * 4) == pytest.approx(4.127, abs=0.001)


def test_checkpointing_trades_activations_for_nothing_else() -> None:
    model, batch, optimizer = trainings.gpt()
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
    tokens = torch.empty(1, 128, dtype=torch.int64, device="meta")
    model = Decoder(DecoderShape(layers=4, width=11392, heads=89))  # as many parameters in few layers: a quick test
    estimate = estimate_memory(model, (tokens, tokens), optimizer="sgd", precision="bf16", zero_stage=3, world_size=8)
    assert estimate.parameters == pytest.approx(7e9, rel=0.03)
    assert estimate.state_bytes == pytest.approx(8 * 7e9 / 8, rel=0.03)


class Gated(nn.Module):
    """Reads a value back in the middle, as routers and beams do. Its buffer and dropout are state that must not
    move."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 256), nn.Linear(256, 8)
        self.norm = nn.BatchNorm1d(256)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.one(x))
        if hidden.abs().max().item() > 0:
            hidden = self.drop(hidden)
        return self.two(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make", [Gated, lambda: nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 8))]
)
def test_model_optimizer_and_generators_are_left_alone(make: Callable[[], nn.Module]) -> None:
    def state() -> str:
        parts: list[Any] = [tensor.tolist() for tensor in model.state_dict().values()]
        parts += [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
        parts += [model.training, optimizer.state_dict(), torch.get_rng_state().tolist(), random.getstate()]
        return repr([*parts, str(np.random.get_state()), [len(module._forward_hooks) for module in model.modules()]])

    torch.manual_seed(1)
    model = make().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batch = (torch.randn(16, 64), torch.randint(0, 8, (16,)))
    functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    before = state()
    estimate = estimate_memory(model, batch, optimizer=optimizer)
    assert state() == before
    assert estimate.measured == isinstance(model, Gated)
    assert estimate.weights_bytes == sum(tensor.nbytes for tensor in model.state_dict().values())


def test_keyword_batches_and_models_that_answer_their_loss() -> None:
    class WithLoss(nn.Linear):
        def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": functional.cross_entropy(super().forward(features), labels)}

    batch = {"features": torch.randn(8, 32), "labels": torch.randint(0, 4, (8,))}
    assert estimate_memory(WithLoss(32, 4), batch).gradients_bytes == 4 * (32 * 4 + 4)


def test_counts_as_people_write_them() -> None:
    assert [count_read(text) for text in ("7B", "350m", "1.3e9", "12")] == [7 * 10**9, 350 * 10**6, 1_300_000_000, 12]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--demo --sequence 4096", "--sequence is 4096, and the model with its batches comes from elsewhere"),
        ("--layers 0", "takes --layers, --width and --heads"),
        ("--parameters 100M --vocabulary 50000000", "there is no decoder of 100,000,000 parameters with a vocabulary"),
        ("x.py --parameters 7B", "give one of"),
        pytest.param("--config nothing", "no configuration", marks=pytest.mark.frameworks),
    ],
)
def test_options_that_would_be_left_unread_are_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ran(command, *words.split())


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shape = "--layers 2 --width 128 --heads 2 --vocabulary 256 --sequence 64 --lora 4"
    assert ran(command, *shape.split()) == 0
    shown = capsys.readouterr().out
    assert "a decoder of 2 layers" in shown
    assert "in the backward pass" in shown
    assert "LoRA of rank 4 beside 14 linear layers" in shown
    script = "import torch\ndef made():\n    return torch.nn.Linear(8, 2), torch.zeros(4, 8)\n"
    (tmp_path / "pair.py").write_text(script)
    assert ran(command, f"{tmp_path / 'pair.py'}:made", "--optimizer", "sgd", "--json") == 0
    assert json.loads(capsys.readouterr().out)["weights_bytes"] == 4 * 18
    assert ran(command, "--demo", "--json") == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 501_312


@pytest.mark.frameworks
def test_a_configuration_of_transformers_is_enough(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shape = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 128, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert ran(command, "--config", str(tmp_path), "--sequence", "32", "--lora", "4", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["what"].startswith("GPT2LMHeadModel")
    assert figures["trainable"] < 0.2 * figures["parameters"]
