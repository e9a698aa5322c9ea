"""`python ranks_job.py FOLDER`: two ranks over gloo, rank 1 a fork of rank 0, keep each promise of PROMISES. Each writes
what became of them: nothing, or a traceback.

Micro-batches have unequal numbers of items on both ranks, the last window of an epoch is shorter, gradients are
clipped.
"""

from __future__ import annotations

import datetime
import functools
import gc
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from big_batches import Batch, Stream, adamw, batches_of, big_batches, flat, loss_of, net
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import perfagent
from perfagent.errors import CheckpointError, ConfigError
from perfagent_loop import collectives
from perfagent_loop.fsdp import blocks_of

ACCUMULATED, BATCHES, CLIP = 3, 8, 0.05
FOLDER = Path()


def batches_of_rank(rank: int, number: int = BATCHES) -> list[Batch]:
    """Batches of 1 to 7 items."""
    generator = torch.Generator().manual_seed(100 + rank)
    return batches_of(torch.randint(1, 8, (number,), generator=generator).tolist(), 100 + rank)


# ---- loops of each kind


def ddp(model: nn.Module, **options: Any) -> perfagent.Loop:
    return _loop(perfagent.ddp(model), **options)


def fsdp2(model: nn.Module, **options: Any) -> perfagent.Loop:
    return _loop(perfagent.fsdp(model), **options)


def _loop(model: nn.Module, **options: Any) -> perfagent.Loop:
    return perfagent.loop(model, adamw(model), **{"grad_accum": ACCUMULATED, "clip_norm": CLIP, **options})


def zero(model: nn.Module, stage: int) -> perfagent.Loop:
    given: dict[str, Any] = {"grad_accum": ACCUMULATED, "clip_norm": CLIP, "bucket_elements": 1000}
    config = perfagent.zero_config(stage, micro_batch=1, precision="fp32", device="cpu", **given)
    return perfagent.loop(engine_of(model, config, optimizer=adamw(model)))


def engine_of(model: nn.Module, config: dict[str, Any], **options: Any) -> Any:
    return sys.modules["deepspeed"].initialize(model=model, config=config, dist_init_required=False, **options)[0]


def train(loop: perfagent.Loop, data: Any, *, steps: int, items: Any = None) -> list[float]:
    """The norms."""
    norms = []
    for batch in loop.batches(data, epochs=None, items=items, steps=steps):
        with loop.forward():
            loss = loss_of(loop.model, batch)
        loop.backward(loss, None if items else len(batch[0]))
        result = loop.step()
        if result.stepped:
            norms.append(float(result.grad_norm))
    assert loop.step_count == steps
    return norms


# ---- the promises


def is_one_process(
    rank: int, make: Any, *, steps: int = 20, stream: bool = False, items: Any = None, recomputes: bool = False
) -> None:
    """So many steps are those of one process with big batches."""
    mine, model = batches_of_rank(rank), net()
    if recomputes:
        perfagent.checkpoint_activations(model, "all")
    loop = make(model)
    norms = train(loop, DataLoader(Stream(mine), batch_size=None) if stream else mine, steps=steps, items=items)
    weights, right = truth(steps)
    assert_close(torch.tensor(norms), torch.tensor(right), rtol=1e-5, atol=0)
    assert_close(flat(loop.model), weights, rtol=0, atol=1e-6)


@functools.cache
def truth(steps: int) -> tuple[torch.Tensor, list[float]]:
    return big_batches([batches_of_rank(0), batches_of_rank(1)], ACCUMULATED, steps=steps, clip=CLIP)


def gradients_travel_once_a_window(rank: int) -> None:
    replicated, sharded, travels = ddp(net()), fsdp2(net()), []
    module: Any = replicated.model
    module.register_comm_hook(
        module.process_group, lambda group, bucket: travels.append("ddp") or allreduce_hook(group, bucket)
    )
    train(replicated, batches_of_rank(rank), steps=10)
    assert travels == ["ddp"] * 10
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    with mock.patch.object(dist, name, wraps=getattr(dist, name)) as scattered:
        train(sharded, batches_of_rank(rank), steps=10)
    assert scattered.call_count == 10 * 3, "two layers and the rest are shards of their own"


def last_windows_of_unequal_length_weigh_micro_steps_alike(rank: int) -> None:
    """Ranks with 8 and 7 batches make as many windows of 3; ranks with 7 and 6 do not."""
    loop, mine = ddp(net()), [batches_of_rank(0), batches_of_rank(1)[:7]]
    for batch in loop.batches(mine[rank], epochs=2):
        with loop.forward():
            loss = loss_of(loop.model, batch)
        loop.backward(loss)
        loop.step()
    assert loop.step_count == 6
    assert_close(flat(loop.model), big_batches(mine, 3, steps=6, clip=CLIP, as_whole=False)[0], rtol=0, atol=1e-6)
    with pytest.raises(ConfigError, match="7, 6 batches"):  # one rank would wait for the other
        next(loop.batches([0] * (7 - rank)))


def what_cannot_work_is_refused(rank: int) -> None:
    whole, model = net(), perfagent.ddp(net())
    unequal = batches_of([2, 2, 2, 3])
    partly = net()
    perfagent.fsdp(partly.out)
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("needs NCCL", lambda: perfagent.comm_hook(model, "bf16")),
        ("hangs", lambda: perfagent.comm_hook(model, "powersgd")),
        (r"perfagent\.fsdp", lambda: perfagent.comm_hook(whole, "fp16")),
        ("2 and 3", lambda: train(zero(net(), 2), unequal, steps=2)),
        ("items=lambda batch", lambda: train(zero(net(), 2), [unequal[0 if rank else 3]] * 3, steps=1)),
        ("exclude each other", lambda: perfagent.ddp(whole, static_graph=True, find_unused_parameters=True)),
        ("wrapped by DistributedDataParallel already", lambda: perfagent.ddp(model)),
        ("above 0", lambda: perfagent.ddp(whole, bucket_mb=0)),
        ("requires a gradient", lambda: perfagent.ddp(net().requires_grad_(False))),
        ("3 Linear", lambda: perfagent.fsdp(whole, blocks=[nn.Conv1d])),
        ("keep them in float32", lambda: perfagent.fsdp(net().bfloat16(), precision="bf16")),
        ("no GPU here", lambda: perfagent.fsdp(whole, offload=True)),
        ("fp32, bf16, fp16", lambda: perfagent.fsdp(whole, reduce="int8")),  # type: ignore[arg-type]
        (r"layers\.0\.0\.weight", lambda: _loop(partly)),  # nobody would average its gradients over the ranks
    ]
    for said, call in wrong:
        with pytest.raises(ConfigError, match=said):
            call()
    partly.layers.requires_grad_(False)
    assert _loop(partly).strategy.kind == "fsdp2"


def shards_are_the_blocks_in_the_precision_asked_for(rank: int) -> None:
    from torch.distributed.fsdp import FSDPModule

    def shards(model: nn.Module) -> list[str]:
        return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]

    model = perfagent.fsdp(net(), precision="bf16")
    assert shards(model) == ["", "layers.0", "layers.1"]
    assert model(torch.ones(1, 4)).dtype == torch.bfloat16
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert shards(perfagent.fsdp(net(), blocks=[nn.Linear])) == ["", "layers.0.0", "layers.1.0", "out"]
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []  # not alike
    assert blocks_of(nn.ModuleDict({"acts": nn.ModuleList([nn.ReLU(), nn.ReLU()])})) == []  # nothing to shard


def options_of_ddp_reach_it_and_its_fp16_hook_trains(rank: int) -> None:
    model: Any = perfagent.ddp(net(), bucket_mb=50, static_graph=True)
    assert (model.bucket_bytes_cap, model.static_graph, model.gradient_as_bucket_view) == (50 * 2**20, True, True)
    halved = _loop(perfagent.ddp(net(), hook="fp16"))
    assert train(halved, batches_of_rank(rank), steps=4)[3] == pytest.approx(truth(4)[1][3], rel=1e-2)


def an_overflow_on_one_rank_skips_the_step_on_all(rank: int) -> None:
    for make in (ddp, fsdp2):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        loop = make(net(), precision="fp16", grad_accum=1, scaler=scaler)
        before, skipped, moved = flat(loop.model), [], []
        for number, batch in enumerate(batches_of_rank(rank, 2)):
            with loop.forward():
                loss = loss_of(loop.model, batch)
            loop.backward(loss * (float("inf") if rank == 1 and number == 0 else 1.0))
            skipped.append(loop.step().skipped)
            moved.append(not torch.equal(flat(loop.model), before))
        assert (skipped, moved, scaler.get_scale()) == ([True, False], [False, True], 512.0)


def a_state_put_into_another_loop_goes_on_bit_for_bit(rank: int) -> None:
    for make in (ddp, fsdp2):
        whole, first, second = (make(net()) for _ in range(3))
        train(whole, batches_of_rank(rank), steps=6)
        train(first, batches_of_rank(rank), steps=4)
        second.load_state_dict(first.state_dict())
        train(second, batches_of_rank(rank), steps=6)
        assert torch.equal(flat(second.model), flat(whole.model))


def an_engine_in_bf16_steps_and_schedules_once_a_window(rank: int) -> None:
    """And what it decides, the loop is not told otherwise."""
    config = perfagent.zero_config(
        1, micro_batch=1, grad_accum=2, clip_norm=1.0, device="cpu",
        optimizer={"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    )  # fmt: skip
    engine = engine_of(net(), config)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("bf16", {"precision": "fp16"}), ("gradient_accumulation_steps 2", {"grad_accum": 4}),
        ("gradient_clipping 1.0", {"clip_norm": 0.5}), ("not the engine's", {"optimizer": adamw(net())}),
    ]  # fmt: skip
    for said, options in wrong:
        with pytest.raises(ConfigError, match=said):
            perfagent.loop(engine, **options)
    loop = perfagent.loop(engine, scheduler=engine.lr_scheduler, precision="bf16", grad_accum=2, clip_norm=1.0)
    norms = []
    for x, y in loop.batches(batches_of_rank(rank, 7)):
        with loop.forward():
            loss = nn.functional.mse_loss(engine(x.bfloat16()).float(), y)
        loop.backward(loss)
        result = loop.step()
        if result.stepped:
            norms.append(float(result.grad_norm))
    assert loop.step_count == engine.global_steps == len(norms) == 4  # seven micro-steps, windows of two
    assert engine.lr_scheduler.last_batch_iteration == 3  # counted from 0
    assert (loop.state_dict()["model"], loop.state_dict()["optimizer"]) == (None, None), "the engine saves its own"
    everybody = [torch.empty(4), torch.empty(4)]
    dist.all_gather(everybody, torch.tensor(norms))
    assert torch.equal(*everybody) and all(0.0 < norm < 100.0 for norm in norms)


def sampled(rank: int, world: int) -> DataLoader[Any]:
    """Samples 0 to 23 in order, one a batch, dealt out to the ranks."""
    generator = torch.Generator().manual_seed(8)
    data = TensorDataset(torch.arange(24), torch.randn(24, 4, generator=generator))
    return DataLoader(data, batch_size=1, sampler=DistributedSampler(data, world, rank, shuffle=False))


def checkpointed(model: Any, folder: Path) -> perfagent.Loop:
    return _loop(model, clip_norm=None, checkpoint=perfagent.Checkpoint(folder, emergency=False))


def train_sampled(loop: perfagent.Loop, data: Any, steps: int) -> list[int]:
    """Which samples were seen."""
    seen = []
    for index, x in loop.batches(data, steps=steps):
        with loop.forward():
            loss = loop.model(x).square().mean()
        loop.backward(loss)
        loop.step()
        seen.append(int(index))
    return seen


def both_go_on_from_a_checkpoint_of_one(rank: int) -> None:
    """And leave two of both ranks."""
    loop = checkpointed(perfagent.ddp(net()), FOLDER / "of_one")
    torch.manual_seed(50 + rank)
    before = torch.get_rng_state()
    assert loop.resume() == 2
    assert torch.equal(torch.get_rng_state(), before) == (rank == 1), "the numbers of one process are rank 0's"
    assert torch.equal(flat(loop.model), torch.load(FOLDER / "of_one.pt"))
    assert train_sampled(loop, sampled(rank, 2), steps=3) == [6 + rank, 8 + rank, 10 + rank]
    with pytest.raises(CheckpointError, match=r"perfagent\.ddp\(model\)"):
        checkpointed(perfagent.fsdp(net()), FOLDER / "of_one").resume()
    for name, wrap in (("of_two", perfagent.ddp), ("sharded", perfagent.fsdp)):
        loop = checkpointed(wrap(net()), FOLDER / name)
        train_sampled(loop, sampled(rank, 2), steps=2)
        loop.checkpoint.save_loop(loop)  # type: ignore[union-attr]
        if rank == 0 and name == "of_two":
            torch.save(flat(loop.model), FOLDER / "of_two.pt")


def ranks_split_alike_when_one_runs_out_of_memory(rank: int) -> None:
    plain, (inputs, targets) = net().double(), (torch.randn(16, 4).double(), torch.randn(16, 2).double())

    def gradients() -> torch.Tensor:
        return torch.cat([p.grad.flatten().clone() for p in plain.parameters() if p.grad is not None])

    def whole(rows: int) -> torch.Tensor:
        """Gradients of a single process."""
        loss_of(plain, (inputs[:rows], targets[:rows])).backward()
        found = gradients()
        plain.zero_grad()
        return found

    def compute(piece: Batch) -> torch.Tensor:
        loss = loss_of(model, piece)
        if rank == 1 and len(piece[0]) > 2:
            loss.backward()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    def part(begin: int, rows: int) -> Batch:
        return inputs[begin : begin + rows], targets[begin : begin + rows]

    expected, model = whole(16), nn.parallel.DistributedDataParallel(plain)
    loop = perfagent.loop(model, torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=1e9)
    split = perfagent.SplitOnOom(loop)
    split.backward(part(8 * rank, 8), compute)
    assert split.pieces == 4
    assert_close(gradients(), expected, rtol=0, atol=1e-12)
    loop.step()
    train(loop, [part(8 * rank, 8)], steps=2)  # an ordinary step afterwards still averages by itself
    after = flat(plain)
    both = [torch.empty_like(after), torch.empty_like(after)]
    dist.all_gather(both, after)
    assert torch.equal(*both)
    # a loader without a length, of which nobody knows whether the ranks' are equal
    for _ in loop.batches(iter([None])):
        split.backward(part(8 * rank, 8), compute)
        loop.step()
    assert not torch.equal(flat(plain), after)
    of_all = whole(12)
    # ranks of unequal batches
    perfagent.SplitOnOom(loop, items=lambda piece: len(piece[0])).backward(part(4 * rank, 4 + 4 * rank), compute)
    assert_close(gradients(), of_all, rtol=0, atol=1e-12)


def no_thread_holds_a_tensor_when_a_collective_returns(rank: int) -> None:
    """A script may end right after it."""
    held = 0
    for _ in range(200):
        mine, others = torch.ones(3), [torch.empty(3), torch.empty(3)]
        before = sys.getrefcount(mine), sys.getrefcount(others[0])
        collectives.all_reduce(mine)
        held += sys.getrefcount(mine) > before[0]
        collectives.all_gather(others, mine)
        held += sys.getrefcount(mine) > before[0] or sys.getrefcount(others[0]) > before[1]
    assert mine.tolist() == others[0].tolist() == [2.0, 2.0, 2.0]
    collectives.all_reduce(low := torch.tensor(float(rank)), dist.ReduceOp.MIN)
    assert low.item() == 0.0
    agreement = collectives.Agreement(mock.Mock(group=dist.group.WORLD))
    agreement.look(1, time.monotonic())
    numbers = agreement._numbers
    agreement._before += 1  # that name
    others_of_it = sys.getrefcount(numbers) - 1
    del agreement  # its sum is still on its way, as where a script ends
    assert held + (sys.getrefcount(numbers) > others_of_it) == 0


def _items(batch: Batch) -> int:
    return len(batch[0])


PROMISES: dict[str, Callable[[int], None]] = {
    **{
        f"{name} trains as one process": functools.partial(is_one_process, **strategy)
        for name, strategy in {
            "ddp": {"make": ddp, "steps": 50},
            "ddp, a stream": {"make": ddp, "stream": True, "items": _items},
            "ddp, recomputed": {"make": ddp, "recomputes": True},
            "fsdp2": {"make": fsdp2, "steps": 50},
            "fsdp2, items": {"make": fsdp2, "items": lambda batch: torch.tensor(len(batch[0]))},
            "fsdp2, recomputed": {"make": fsdp2, "recomputes": True},
            "zero1": {"make": functools.partial(zero, stage=1), "steps": 50, "items": _items},
            "zero2, a stream": {"make": functools.partial(zero, stage=2), "steps": 50, "items": _items, "stream": True},
            "zero3": {"make": functools.partial(zero, stage=3), "steps": 50, "items": _items},
        }.items()
    },
    **{
        promise.__name__.replace("_", " "): promise
        for promise in (
            an_engine_in_bf16_steps_and_schedules_once_a_window, gradients_travel_once_a_window,
            last_windows_of_unequal_length_weigh_micro_steps_alike, what_cannot_work_is_refused,
            shards_are_the_blocks_in_the_precision_asked_for, options_of_ddp_reach_it_and_its_fp16_hook_trains,
            an_overflow_on_one_rank_skips_the_step_on_all, a_state_put_into_another_loop_goes_on_bit_for_bit,
            both_go_on_from_a_checkpoint_of_one, ranks_split_alike_when_one_runs_out_of_memory,
            no_thread_holds_a_tensor_when_a_collective_returns,
        )
    },
}  # fmt: skip


def kept(promise: Callable[[int], None], rank: int) -> str:
    try:
        promise(rank)
    except BaseException:
        return traceback.format_exc()
    return ""


def main() -> None:
    global FOLDER
    FOLDER = Path(sys.argv[1])
    torch.set_num_threads(1)
    import deepspeed
    import deepspeed.runtime.zero.muon.muon_optimizer  # which an engine imports, and with it torch's compiler

    gc.freeze()  # or each collection looks through all of what was imported
    other = os.fork()  # here, so that all of it is imported once
    rank = 0 if other else 1
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    collectives.MOST_S = 60.0  # a thread of gloo's may pause for longer than what a training waits for it
    # a rank that broke a promise in its middle leaves the other alone in a collective
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles C++ for a minute
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", dist_init_required=False)
    (FOLDER / f"{rank}.json").write_text(json.dumps({name: kept(promise, rank) for name, promise in PROMISES.items()}))
    dist.barrier()
    os._exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) if other else 0)


if __name__ == "__main__":
    main()
