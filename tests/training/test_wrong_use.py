"""What cannot be is refused at once, with what can."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from resumable import small_loop, train
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import perfagent
from perfagent.errors import ConfigError
from perfagent_loop.checkpoint import Checkpoint
from perfagent_loop.compute.activation import checkpoint_activations
from perfagent_loop.compute.compiling import compile_model
from perfagent_loop.compute.nccl import nccl_preset
from perfagent_loop.compute.packed import packed_attention
from perfagent_loop.data.cache import CachedDataset
from perfagent_loop.data.cache_record import encode
from perfagent_loop.data.collating import join, pad
from perfagent_loop.data.inspecting import inspect_batches
from perfagent_loop.data.length_batches import LengthBucketBatchSampler, TokenBudgetBatchSampler
from perfagent_loop.data.packing import pack, pack_stream
from perfagent_loop.data.prefetch import Prefetcher
from perfagent_loop.deepspeed_config import check_zero_config
from perfagent_loop.estimates.memory import estimate_memory
from perfagent_loop.nonfinite import NanPolicy
from perfagent_loop.search.batch_size import find_batch_size
from perfagent_loop.search.job import TuningJob
from perfagent_loop.search.tuning import tune
from perfagent_loop.search.workers import find_num_workers
from perfagent_loop.split_on_oom import SplitOnOom

OPTIMIZERS = torch.optim


def linear() -> nn.Linear:
    return nn.Linear(4, 2)


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)) for _ in range(2)))


def checkpointed() -> nn.Module:
    checkpoint_activations(model := blocks(), "every:2")
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loop(model: Any = None, **options: Any) -> perfagent.Loop:
    model = linear() if model is None else model
    return perfagent.loop(model, sgd(model), **options)


def attention(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, **options: Any) -> object:
    shapes = shapes or ((2, 4, 6, 8),) * 3
    return perfagent.best_attention(*(torch.ones(shape, dtype=dtype) for shape in shapes), **options)


def packed(lengths: list[int], heads: int = 4, **options: Any) -> object:
    q, k, v = (torch.zeros(32, count, 8) for count in (4, heads, heads))
    return packed_attention(q, k, v, lengths, **options)


def estimated(model: Any = None, **options: Any) -> object:
    return estimate_memory(nn.Sequential(linear(), nn.ReLU()) if model is None else model, torch.zeros(3, 4), **options)


def fake() -> nn.Module:
    with FakeTensorMode():
        return linear()


def job(**changed: Any) -> TuningJob:
    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    given = {"model": (model := linear()), "optimizer": sgd(model), "dataset": data, "loss": lambda model, batch: None}
    return TuningJob(**(given | changed))  # type: ignore[arg-type]


def with_its_loss(job: TuningJob) -> object:
    return estimate_memory(job.with_loss(), (job.batch(8),))


def zero(**options: Any) -> object:
    return perfagent.zero_config(**({"stage": 1, "micro_batch": 1, "device": "cuda"} | options))


class Epochwise:
    """A scheduler as other libraries have them."""

    def step(self, epoch: int) -> None: ...


COMPUTE: list[tuple[str, Callable[[], object]]] = [
    ("mode must be", lambda: checkpoint_activations(blocks(), "some")),
    ("keep takes operators", lambda: checkpoint_activations(blocks(), "all", keep=[torch.ops.aten.mm])),
    ("no list of like modules", lambda: checkpoint_activations(nn.Sequential(linear(), nn.ReLU()))),
    ("torch module", lambda: checkpoint_activations("resnet")),
    ("checkpointed already", lambda: checkpoint_activations(checkpointed())),
    ("before compile", lambda: checkpoint_activations(compile_model(blocks(), blocks=True, backend="eager"))),
    ("0.1 changes its input in place", lambda: checkpoint_activations(blocks(), "selective")),
    ("exclude each other", lambda: attention(causal=True, mask=torch.ones(6, 6))),
    ("torch module", lambda: perfagent.watch_attention("llama").__enter__()),
    ("product does not exist", lambda: attention((1, 1, 2, 3), (1, 1, 2, 4), (1, 1, 2, 4))),
    ("mode must be one of default", lambda: compile_model(linear(), "fastest")),
    ("belongs to the backend inductor", lambda: compile_model(linear(), "max-autotune", backend="aot_eager")),
    ("what torch.compile returned", lambda: compile_model(torch.compile(linear(), backend="eager"))),
    ("compiled already", lambda: compile_model(compile_model(linear(), backend="eager"), backend="eager")),
    ("the model has none", lambda: compile_model(linear(), blocks=True, backend="eager")),
    ("preset must be one of", lambda: nccl_preset("a100")),
    ("no variable of NCCL", lambda: nccl_preset("default", CUDA_LAUNCH_BLOCKING=1)),
    ("add up to 31", lambda: packed([5, 1, 7, 7, 11])),
    ("cannot run: it runs on NVIDIA", lambda: packed([32], method="varlen")),
]
SEARCHES: list[tuple[str, Callable[[], object]]] = [
    ("a function of a batch size", lambda: find_batch_size(7)),
    ("below start", lambda: find_batch_size(print, 8, 4)),
    ("load_state_dict", lambda: find_batch_size(lambda size: None, restore=[object()])),
    ("no batches", lambda: find_num_workers(lambda workers: [])),
    ("fp32, bf16, fp16", lambda: estimated(precision="int4")),
    ("adamw8bit", lambda: estimated(optimizer="adamm")),
    ("LBFGS wants 'closure'", lambda: estimated(optimizer="lbfgs")),
    ("device must be cpu or cuda, not gpu", lambda: estimated(device="gpu")),
    ("add lora", lambda: estimated(quantize="nf4")),
    ("one number", lambda: estimated(loss=lambda output, batch: output)),
    ("torch.nn.Module", lambda: estimated("resnet")),
    ("one batch", lambda: estimated(nn.LazyLinear(4))),
    ("unfreeze some", lambda: estimated(linear().requires_grad_(False))),
    ("FakeTensor", lambda: estimated(fake())),
    ("dataset", lambda: job(dataset=iter([]))),
    ("TuningJob", lambda: tune({"model": 3})),  # type: ignore[arg-type]
    ("returned a NoneType", lambda: with_its_loss(job())),
]
DATA: list[tuple[str, Callable[[], object]]] = [
    ("length 1 is 9, above the 8 tokens that there is room for (2 of 3 are)", lambda: pack([3, 9, 12], 8)),
    ("number 1 is 2.5", lambda: pack([3, 2.5], 8)),
    ("lengths are a list, tensor or array of whole numbers", lambda: pack(None, 8)),
    ("has no 'input_ids': say what counts with length=", lambda: next(pack_stream([{"text": "a"}], 5))),
    ("can be read again, not", lambda: inspect_batches(iter([1]), 3)),
    ("a sample has 3 tokens and the batch is 2 wide", lambda: pad([[1, 2, 3]], length=2)),
    ("a sample needs 'input_ids'; this one has text", lambda: pad([{"text": "a"}])),
    ("'labels' of a sample has the shape (1,) and", lambda: join([{"input_ids": [1, 2], "labels": [1]}])),
    ("samples of one batch have different parts", lambda: pad([{"input_ids": [1], "x": [1]}, {"input_ids": [1]}])),
    ("takes a DataLoader or another iterable of batches, not int", lambda: Prefetcher(3)),
    ("device must be one of torch's", lambda: Prefetcher([], "gpu")),
    ("length 1 is 900, above the 512 tokens", lambda: TokenBudgetBatchSampler([5, 900], 512)),
    ("0 <= rank < world_size; got 2 and 2", lambda: TokenBudgetBatchSampler([5], 512, rank=2, world_size=2)),
    ("boundaries are the rising upper lengths", lambda: LengthBucketBatchSampler([5], 2, boundaries=[9, 3])),
    ("needs a dataset with __getitem__ and __len__", lambda: CachedDataset(iter([1]), "nowhere")),
    ("sample['x'] is a builtins.object, which a cache cannot hold", lambda: encode("k", {"x": object()})),
]
LOOP: list[tuple[str, Callable[[], object]]] = [
    ("fp32, bf16, fp16", lambda: loop(precision="fp8")),
    ("1 or more", lambda: loop(grad_accum=0)),
    ("wants 'epoch'", lambda: loop(scheduler=Epochwise())),
    ("perfagent.Checkpoint", lambda: loop(checkpoint="runs/a")),
    ("precision='fp16'", lambda: loop(precision="bf16", scaler=torch.amp.GradScaler("cpu"))),
    ("not str", lambda: perfagent.loop("resnet", sgd(linear()))),
    ("not NoneType", lambda: perfagent.loop(linear())),
    ("none of the model's parameters", lambda: perfagent.loop(linear(), sgd(linear()))),
    ("LBFGS wants 'closure'", lambda: perfagent.loop(model := linear(), OPTIMIZERS.LBFGS(model.parameters()))),
    ("DataParallel inside", lambda: loop(nn.Sequential(nn.DataParallel(linear())))),
    ("float16 already", lambda: loop(linear().half(), precision="fp16")),
    ("without a backward", lambda: loop().step()),
    ("never end", lambda: loop().batches([], epochs=None)),
    ("torchrun", lambda: perfagent.ddp(linear())),
    ("every must be", lambda: Checkpoint("runs", every=0)),
    ("is a file", lambda: Checkpoint("file")),
    ("name another folder", lambda: train(small_loop(Path("file/runs"), every=1000), steps=1)),
    ("state['model']['a']", lambda: Checkpoint("runs").save(1, {"model": {"a": numpy.zeros(3)}})),
    ("state['scheduler']['f'][1]", lambda: Checkpoint("runs").save(1, {"scheduler": {"f": [1, len]}})),
    ("action must be one of skip, rollback, lower_lr", lambda: NanPolicy("raise")),  # type: ignore[arg-type]
    ("scaler", lambda: NanPolicy().step(loop(precision="fp16"))),
    ("grad_accum=1", lambda: SplitOnOom(small_loop(grad_accum=2))),
    ("must be a dict: json.load", lambda: check_zero_config("ds_config.json")),  # type: ignore[arg-type]
    ("fp32, bf16, fp16", lambda: zero(precision="int8")),
    ("precision='bf16'", lambda: zero(precision="fp32", autocast=True)),
]


@pytest.mark.parametrize(("said", "call"), [*COMPUTE, *SEARCHES, *DATA, *LOOP])
def test_wrong_use_is_refused_with_what_is_allowed(
    said: str, call: Callable[[], object], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(ConfigError) as refused:
        call()
    assert said in str(refused.value)
