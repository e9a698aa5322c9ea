"""What cannot be is refused at once, with what can."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from command_line import ran
from resumable import small_loop, train
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import perfagent
from perfagent_loop.data.cache_record import encode
from perfagent_loop.data.collating import join, pad
from perfagent_loop.deepspeed_config import check_zero_config
from perfagent_loop.estimates.command import command


def linear() -> nn.Linear:
    return nn.Linear(4, 2)


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)) for _ in range(2)))


def compiled() -> nn.Module:
    return perfagent.compile_model(blocks(), blocks=True, backend="eager")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loop(model: nn.Module | None = None, **options: Any) -> perfagent.Loop:
    model = model or linear()
    return perfagent.loop(model, sgd(model), **options)


def attention(*shapes: tuple[int, ...], **options: Any) -> object:
    return perfagent.best_attention(*(torch.ones(shape) for shape in shapes), **options)


def packed(lengths: list[int], **options: Any) -> object:
    return perfagent.packed_attention(*[torch.zeros(32, 4, 8)] * 3, lengths, **options)


def estimate(words: str) -> object:
    return ran(command, *words.split())


def estimated(model: Any = None, **options: Any) -> object:
    return perfagent.estimate_memory(model or nn.Sequential(linear(), nn.ReLU()), torch.zeros(3, 4), **options)


def fake() -> nn.Module:
    with FakeTensorMode():
        return linear()


def job(**changed: Any) -> perfagent.TuningJob:
    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    given = {"model": (model := linear()), "optimizer": sgd(model), "dataset": data, "loss": lambda model, batch: None}
    return perfagent.TuningJob(**(given | changed))


ADAM = {"type": "AdamW", "params": {"lr": 1e-4}}
OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def zero(config: dict[str, Any], device: str = "cuda") -> None:
    check_zero_config({"train_micro_batch_size_per_gpu": 4} | config, device=device, world_size=8)


def bucket(elements: Any) -> object:
    overrides = {"zero_optimization": {"reduce_bucket_size": elements}}
    return perfagent.zero_config(2, micro_batch=1, device="cuda", overrides=overrides)


def half_counted(loop: perfagent.Loop) -> None:
    for count in (2, None):
        loop.backward(loop.model(torch.ones(2, 4)).sum(), count)


class Epochwise:
    """A scheduler as other libraries have them."""

    def step(self, epoch: int) -> None: ...


Wrong = list[tuple[str, Callable[[], object]]]
COMPUTE: Wrong = [
    ("mode must be", lambda: perfagent.checkpoint_activations(blocks(), "some")),
    ("keep takes operators", lambda: perfagent.checkpoint_activations(blocks(), "all", keep=[torch.ops.aten.mm])),
    ("no list of like modules", lambda: perfagent.checkpoint_activations(nn.Sequential(linear(), nn.ReLU()))),
    ("torch module", lambda: perfagent.checkpoint_activations("resnet")),
    ("checkpointed already", lambda: [perfagent.checkpoint_activations(model) for model in [blocks()] * 2]),
    ("before compile", lambda: perfagent.checkpoint_activations(compiled())),
    ("0.1 changes its input in place", lambda: perfagent.checkpoint_activations(blocks(), "selective")),
    ("exclude each other", lambda: attention(*[(2, 4, 6, 8)] * 3, causal=True, mask=torch.ones(6, 6))),
    ("product does not exist", lambda: attention((1, 1, 2, 3), (1, 1, 2, 4), (1, 1, 2, 4))),
    ("mode must be one of default", lambda: perfagent.compile_model(linear(), "fastest")),
    ("belongs to the backend inductor", lambda: perfagent.compile_model(linear(), "max-autotune", backend="aot_eager")),
    ("what torch.compile returned", lambda: perfagent.compile_model(torch.compile(linear(), backend="eager"))),
    ("compiled already", lambda: perfagent.compile_model(compiled(), backend="eager")),
    ("the model has none", lambda: perfagent.compile_model(linear(), blocks=True, backend="eager")),
    ("no variable of NCCL", lambda: perfagent.nccl_preset("default", CUDA_LAUNCH_BLOCKING=1)),
    ("add up to 31", lambda: packed([5, 1, 7, 7, 11])),
    ("cannot run: it runs on NVIDIA", lambda: packed([32], method="varlen")),
]
SEARCHES: Wrong = [
    ("a function of a batch size", lambda: perfagent.find_batch_size(7)),
    ("below start", lambda: perfagent.find_batch_size(print, 8, 4)),
    ("load_state_dict", lambda: perfagent.find_batch_size(lambda size: None, restore=[object()])),
    ("no batches", lambda: perfagent.find_num_workers(lambda workers: [])),
    ("adamw8bit", lambda: estimated(optimizer="adamm")),
    ("device must be cpu or cuda, not gpu", lambda: estimated(device="gpu")),
    ("add lora", lambda: estimated(quantize="nf4")),
    ("one number", lambda: estimated(loss=lambda output, batch: output)),
    ("one batch", lambda: estimated(nn.LazyLinear(4))),
    ("unfreeze some", lambda: estimated(linear().requires_grad_(False))),
    ("FakeTensor", lambda: estimated(fake())),
    ("dataset", lambda: job(dataset=iter([]))),
    ("TuningJob", lambda: perfagent.tune({"model": 3})),  # type: ignore[arg-type]
    ("returned a NoneType", lambda: estimated(job().with_loss())),
    ("--sequence is 4096, and the model with its batches comes", lambda: estimate("--demo --sequence 4096")),
    ("takes --layers, --width and --heads", lambda: estimate("--layers 0")),
    ("no decoder of 100,000,000 parameters with", lambda: estimate("--parameters 100M --vocabulary 50000000")),
    ("give one of", lambda: estimate("x.py --parameters 7B")),
]
DATA: Wrong = [
    ("length 1 is 9, above the 8 tokens that there is room for (2 of 3 are)", lambda: perfagent.pack([3, 9, 12], 8)),
    ("number 1 is 2.5", lambda: perfagent.pack([3, 2.5], 8)),
    ("lengths are a list, tensor or array of whole numbers", lambda: perfagent.pack(None, 8)),
    ("has no 'input_ids': say what counts with length=", lambda: next(perfagent.pack_stream([{"text": "a"}], 5))),
    ("can be read again, not", lambda: perfagent.inspect_batches(iter([1]), 3)),
    ("a sample has 3 tokens and the batch is 2 wide", lambda: pad([[1, 2, 3]], length=2)),
    ("a sample needs 'input_ids'; this one has text", lambda: pad([{"text": "a"}])),
    ("'labels' of a sample has the shape (1,) and", lambda: join([{"input_ids": [1, 2], "labels": [1]}])),
    ("samples of one batch have different parts", lambda: pad([{"input_ids": [1], "x": [1]}, {"input_ids": [1]}])),
    ("takes a DataLoader or another iterable of batches, not int", lambda: perfagent.Prefetcher(3)),
    ("device must be one of torch's", lambda: perfagent.Prefetcher([], "gpu")),
    ("0 <= rank < world_size; got 2 and 2", lambda: perfagent.TokenBudgetBatchSampler([5], 512, rank=2, world_size=2)),
    ("boundaries are the rising upper lengths", lambda: perfagent.LengthBucketBatchSampler([5], 2, boundaries=[9, 3])),
    ("needs a dataset with __getitem__ and __len__", lambda: perfagent.CachedDataset(iter([1]), "nowhere")),
    ("sample['x'] is a builtins.object, which a cache cannot hold", lambda: encode("k", {"x": object()})),
]
LOOP: Wrong = [
    ("fp32, bf16, fp16", lambda: loop(precision="fp8")),
    ("1 or more", lambda: loop(grad_accum=0)),
    ("wants 'epoch'", lambda: loop(scheduler=Epochwise())),
    ("perfagent.Checkpoint", lambda: loop(checkpoint="runs/a")),
    ("precision='fp16'", lambda: loop(precision="bf16", scaler=torch.amp.GradScaler("cpu"))),
    ("not str", lambda: perfagent.loop("resnet", sgd(linear()))),
    ("not NoneType", lambda: perfagent.loop(linear())),
    ("none of the model's parameters", lambda: perfagent.loop(linear(), sgd(linear()))),
    ("LBFGS wants 'closure'", lambda: perfagent.loop(model := linear(), torch.optim.LBFGS(model.parameters()))),
    ("DataParallel inside", lambda: loop(nn.Sequential(nn.DataParallel(linear())))),
    ("float16 already", lambda: loop(linear().half(), precision="fp16")),
    ("without a backward", lambda: loop().step()),
    ("never end", lambda: loop().batches([], epochs=None)),
    ("torchrun", lambda: perfagent.ddp(linear())),
    ("is a file", lambda: perfagent.Checkpoint("file")),
    ("name another folder", lambda: train(small_loop(Path("file/runs"), every=1000), steps=1)),
    ("state['model']['a']", lambda: perfagent.Checkpoint("runs").save(1, {"model": {"a": numpy.zeros(3)}})),
    ("state['scheduler']['f'][1]", lambda: perfagent.Checkpoint("runs").save(1, {"scheduler": {"f": [1, len]}})),
    ("action must be one of skip, rollback, lower_lr", lambda: perfagent.NanPolicy("raise")),  # type: ignore[arg-type]
    ("scaler", lambda: perfagent.NanPolicy().step(loop(precision="fp16"))),
    ("needs something to go back to", lambda: train(small_loop(), steps=1, step=perfagent.NanPolicy("rollback").step)),
    ("for all or none", lambda: half_counted(loop(grad_accum=3))),
    ("grad_accum=1", lambda: perfagent.SplitOnOom(small_loop(grad_accum=2))),
    ("must be a dict: json.load", lambda: check_zero_config("ds_config.json")),  # type: ignore[arg-type]
    ("precision='bf16'", lambda: perfagent.zero_config(1, micro_batch=1, precision="fp32", autocast=True)),
]

ZERO: Wrong = [
    ('zero_optimization.reduce_bucket_size is "auto"', lambda: bucket("auto")),
    ("amp is laid over bf16", lambda: zero({"bf16": {"enabled": True}, "amp": {"enabled": True}})),
    ("does not work with ZeRO", lambda: zero({"amp": {"enabled": True}, "zero_optimization": {"stage": 1}})),
    ("both enabled", lambda: zero({"bf16": {"enabled": True}, "fp16": {"enabled": True}})),
    ("this is a CPU", lambda: zero({"fp16": {"enabled": True}}, "cpu")),
    ('bf16 is True; it must be an object such as {"enabled": true}', lambda: zero({"bf16": True})),
    ("bf16.enabled is 'true'; it must be true or false", lambda: zero({"bf16": {"enabled": "true"}})),
    ('optimizer.params.lr is "auto"', lambda: zero({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})),
    ('"torch_adam": true', lambda: zero({"optimizer": ADAM}, "cpu")),
    ("offload_param needs stage 3", lambda: zero({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})),
    ("in host memory already", lambda: zero({"zero_optimization": OFFLOADED, "optimizer": ADAM}, "cpu")),
    ("zero_force_ds_cpu_optimizer", lambda: zero({"zero_optimization": OFFLOADED})),
    ("no nvme_path", lambda: zero({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})),
    ("old name", lambda: zero({"zero_optimization": {"stage": 2, "cpu_offload": True}})),
    ("no effect in stage 2", lambda: zero({"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1}})),
    ("number of elements", lambda: zero({"zero_optimization": {"stage": 1, "reduce_bucket_size": 0}})),
    ("largest norm", lambda: zero({"gradient_clipping": -1})),
    ("4 samples x 4 micro-steps x 8 ranks are 128", lambda: zero({"train_batch_size": 100, "gradient_accumulation_steps": 4})),
]  # fmt: skip


NO_CONFIGURATION = pytest.param("no configuration", lambda: estimate("--config nothing"), marks=pytest.mark.frameworks)


@pytest.mark.parametrize(("said", "call"), [*COMPUTE, *SEARCHES, *DATA, *LOOP, *ZERO, NO_CONFIGURATION])
def test_wrong_use_is_refused_with_what_is_allowed(
    said: str, call: Callable[[], object], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(perfagent.ConfigError) as refused:
        call()
    assert said in str(refused.value)
