"""`python ranks_job.py FOLDER`: two ranks train the same model in every way the loop knows; each writes what came out
of it.

Rank 1 is a fork of rank 0. Micro-batches have unequal numbers of items on both ranks, the last window of an epoch is
shorter, gradients are clipped.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset

import perfagent
from perfagent.errors import CheckpointError, ConfigError

STEPS, ACCUMULATED, BATCHES, CLIP = 50, 3, 8, 0.05
Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)])
        self.out = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def batches_of(rank: int, number: int = BATCHES) -> list[Batch]:
    """Batches of 1 to 7 items."""
    generator = torch.Generator().manual_seed(100 + rank)
    sizes = torch.randint(1, 8, (number,), generator=generator).tolist()
    return [(torch.randn(size, 6, generator=generator), torch.randn(size, 1, generator=generator)) for size in sizes]


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def big_batches(ranks: list[list[Batch]], steps: int, accumulated: int = ACCUMULATED) -> dict[str, Any]:
    """The truth: one process, and one big batch for all that the ranks see in a window."""
    model = net()
    optimizer = adamw(model)
    norms: list[float] = []
    while len(norms) < steps:
        for begin in range(0, max(map(len, ranks)), accumulated):
            window = [batch for of_rank in ranks for batch in of_rank[begin : begin + accumulated]]
            whole = torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])
            loss_of(model, whole).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
            if len(norms) == steps:
                break
    return {"norms": norms, "weights": flat(model), "loss": held_out(model)}


def flat(model: nn.Module) -> list[float]:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in (q.detach() for q in model.parameters())]
    return torch.cat([one.reshape(-1) for one in whole]).tolist()


def held_out(model: Callable[[torch.Tensor], torch.Tensor]) -> float:
    with torch.no_grad():
        return float(loss_of(model, batches_of(9, 1)[0]))


def train(
    model: Any, optimizer: Any, data: Any, *, steps: int = STEPS, items: Any = None, **options: Any
) -> dict[str, Any]:
    loop = perfagent.loop(model, optimizer, **{"grad_accum": ACCUMULATED, "clip_norm": CLIP, **options})
    norms = []
    for batch in loop.batches(data, epochs=None, items=items, steps=steps):
        with loop.forward():
            loss = loss_of(model, batch)
        loop.backward(loss, None if items else len(batch[0]))
        result = loop.step()
        if result.stepped:
            norms.append(float(result.grad_norm))
    assert loop.step_count == steps
    return {"norms": norms}


def ended(said: dict[str, Any], model: Any) -> dict[str, Any]:
    return {**said, "weights": flat(model), "loss": held_out(model)}


class Stream(IterableDataset[Batch]):
    """Nobody knows how many there are."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def zero(stage: int, data: Any, **options: Any) -> dict[str, Any]:
    import deepspeed

    model = net()
    config = perfagent.zero_config(
        stage,
        micro_batch=1,
        precision="fp32",
        grad_accum=ACCUMULATED,
        clip_norm=CLIP,
        device="cpu",
        bucket_elements=1000,
    )
    engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=config, dist_init_required=False)[0]
    said = train(engine, None, data, grad_accum=None, clip_norm=None, **options)
    if stage == 3:
        with deepspeed.zero.GatheredParameters([*model.parameters()]):
            said["weights"] = flat(model)
        return {**said, "loss": held_out(engine)}
    return ended(said, model)


def same_training(rank: int) -> dict[str, Any]:
    """Every strategy on the same data."""
    mine = batches_of(rank)
    said: dict[str, Any] = {}
    for name, items in (("fsdp2", None), ("fsdp2_items", lambda batch: torch.tensor(len(batch[0])))):
        sharded = perfagent.fsdp(net())
        said[name] = ended(train(sharded, adamw(sharded), mine, items=items), sharded)
    stream = torch.utils.data.DataLoader(Stream(mine), batch_size=None)
    for name, data, items in (("ddp", mine, None), ("ddp_stream", stream, lambda batch: len(batch[0]))):
        model = perfagent.ddp(net())
        said[name] = ended(train(model, adamw(model), data, items=items), model)
    for name, wrap in (("ddp_checkpointed", perfagent.ddp), ("fsdp2_checkpointed", perfagent.fsdp)):
        perfagent.checkpoint_activations(inner := net(), "all")
        wrapped: Any = wrap(inner)
        said[name] = ended(train(wrapped, adamw(wrapped), mine), wrapped)
    for name, stage, data in (("zero1", 1, mine), ("zero2_stream", 2, stream), ("zero3", 3, mine)):
        said[name] = zero(stage, data, items=lambda batch: len(batch[0]))
    return said


def reductions(rank: int) -> dict[str, Any]:
    """How often gradients travel in ten windows."""
    calls = {"ddp": 0, "fsdp2": 0}

    def counting(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        calls["ddp"] += 1
        return (
            dist.all_reduce(bucket.buffer().div_(2), group=group, async_op=True)
            .get_future()
            .then(lambda f: f.value()[0])
        )

    model = perfagent.ddp(net())
    counting.__annotations__ = {}  # torch wants classes there, not their names
    model.register_comm_hook(model.process_group, counting)
    train(model, adamw(model), batches_of(rank), steps=10)

    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    scatter = getattr(dist, name)

    def scattered(*args: Any, **kwargs: Any) -> Any:
        calls["fsdp2"] += 1
        return scatter(*args, **kwargs)

    sharded = perfagent.fsdp(net())
    setattr(dist, name, scattered)
    train(sharded, adamw(sharded), batches_of(rank), steps=10)
    setattr(dist, name, scatter)
    return calls


def uneven_loaders(rank: int) -> dict[str, Any]:
    """Ranks with 8 and 7 batches make as many windows of 3; ranks with 7 and 6 do not."""
    model = perfagent.ddp(net())
    loop = perfagent.loop(model, adamw(model), grad_accum=ACCUMULATED, clip_norm=CLIP)
    for batch in loop.batches([batches_of(rank)[place] for place in range(8 - rank)], epochs=2):
        with loop.forward():
            loss = loss_of(model, batch)
        loop.backward(loss)
        loop.step()
    return {
        "steps": loop.step_count,
        "weights": flat(model),
        "refused": refused(lambda: next(loop.batches([0] * (7 - rank)))),
    }


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ConfigError, CheckpointError) as error:
        return str(error)
    return ""


def refusals(rank: int) -> dict[str, str]:
    model = perfagent.ddp(net())
    zeroed = [(torch.zeros(size, 6), torch.zeros(size, 1)) for size in (2, 2, 2, 3)]
    said = {
        "bf16": refused(lambda: perfagent.comm_hook(model, "bf16")),
        "powersgd": refused(lambda: perfagent.comm_hook(model, "powersgd")),
        "not_ddp": refused(lambda: perfagent.comm_hook(net(), "fp16")),
        "zero_unequal": refused(lambda: zero(2, zeroed, steps=2)),
        "zero_unequal_ranks": refused(lambda: zero(2, [zeroed[0] if rank else zeroed[3]] * 3, steps=1)),
        "static_and_unused": refused(lambda: perfagent.ddp(net(), static_graph=True, find_unused_parameters=True)),
    }
    halved = perfagent.ddp(net(), hook="fp16")
    said["fp16_trains"] = str(train(halved, adamw(halved), batches_of(rank), steps=4)["norms"][-1])
    return said


def skipping_together(rank: int) -> dict[str, Any]:
    """An overflow on one rank: all ranks leave out the step, and the scale halves everywhere."""
    said = {}
    for name, wrap in (("ddp", perfagent.ddp), ("fsdp2", perfagent.fsdp)):
        model: Any = wrap(net())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        loop = perfagent.loop(model, adamw(model), precision="fp16", clip_norm=CLIP, scaler=scaler)
        before, skipped = flat(model), []
        for number, batch in enumerate(batches_of(rank, 2)):
            with loop.forward():
                loss = loss_of(model, batch)
            loop.backward(loss * (float("inf") if rank == 1 and number == 0 else 1.0))
            skipped.append(loop.step().skipped)
            if number == 0:
                kept = flat(model) == before
        said[name] = {"skipped": skipped, "kept": kept, "scale": scaler.get_scale(), "moved": flat(model) != before}
    return said


def going_on(rank: int) -> dict[str, Any]:
    """State of a loop, put into another one: six steps are four and two."""

    def run(wrap: Any, steps: int, state: Any = None) -> perfagent.Loop:
        model = wrap(net())
        loop = perfagent.loop(model, adamw(model), grad_accum=ACCUMULATED, clip_norm=CLIP)
        if state is not None:
            loop.load_state_dict(state)
        return _run(loop, batches_of(rank), steps)

    return {
        name: flat(run(wrap, 6, run(wrap, 4).state_dict()).model) == flat(run(wrap, 6).model)
        for name, wrap in (("ddp", perfagent.ddp), ("fsdp2", perfagent.fsdp))
    }


def _run(loop: perfagent.Loop, data: list[Batch], steps: int) -> perfagent.Loop:
    for batch in loop.batches(data, epochs=None, steps=steps):
        with loop.forward():
            loss = loss_of(loop.model, batch)
        loop.backward(loss, len(batch[0]))
        loop.step()
    return loop


def engine_options(rank: int) -> dict[str, Any]:
    """What the engine decides and the loop is told as well."""
    import deepspeed

    half = perfagent.zero_config(
        1, micro_batch=1, grad_accum=2, clip_norm=1.0, device="cpu",
        optimizer={"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    )  # fmt: skip
    engine = deepspeed.initialize(model=net(), config=half, dist_init_required=False)[0]
    said: dict[str, Any] = {
        "precision": refused(lambda: perfagent.loop(engine, precision="fp16")),
        "grad_accum": refused(lambda: perfagent.loop(engine, grad_accum=4)),
        "clip_norm": refused(lambda: perfagent.loop(engine, clip_norm=0.5)),
        "optimizer": refused(lambda: perfagent.loop(engine, adamw(net()))),
    }
    schedule = engine.lr_scheduler
    loop = perfagent.loop(engine, scheduler=schedule, precision="bf16", grad_accum=2, clip_norm=1.0)
    norms = []
    for x, y in loop.batches(batches_of(rank, 7)):
        with loop.forward():
            loss = nn.functional.mse_loss(engine(x.bfloat16()).float(), y)
        loop.backward(loss)
        result = loop.step()
        if result.stepped:
            norms.append(float(result.grad_norm))
    state = loop.state_dict()
    said |= {"norms": norms, "steps": loop.step_count, "engine_steps": engine.global_steps}
    return said | {"scheduled": schedule.last_batch_iteration, "own": [state["model"], state["optimizer"]]}


def sampled(rank: int, world: int) -> torch.utils.data.DataLoader[Any]:
    """Samples 0 to 23 in order, one a batch, dealt out to the ranks."""
    generator = torch.Generator().manual_seed(8)
    data = torch.utils.data.TensorDataset(torch.arange(24), torch.randn(24, 6, generator=generator))
    sampler = torch.utils.data.DistributedSampler(data, world, rank, shuffle=False)
    return torch.utils.data.DataLoader(data, batch_size=1, sampler=sampler)


def checkpointed(model: Any, folder: Path) -> perfagent.Loop:
    checkpoint = perfagent.Checkpoint(folder, emergency=False)
    return perfagent.loop(model, adamw(model), grad_accum=ACCUMULATED, checkpoint=checkpoint)


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


def other_ranks(rank: int) -> dict[str, Any]:
    """Goes on from a checkpoint of one process, and leaves two of both ranks."""
    loop = checkpointed(perfagent.ddp(net()), FOLDER / "of_one")
    torch.manual_seed(50 + rank)
    before = torch.get_rng_state()
    said: dict[str, Any] = {"step": loop.resume(), "own_numbers": torch.equal(torch.get_rng_state(), before)}
    said["weights"] = flat(loop.model)
    said["seen"] = train_sampled(loop, sampled(rank, 2), steps=3)
    said["fsdp2"] = refused(checkpointed(perfagent.fsdp(net()), FOLDER / "of_one").resume)
    for name, wrap in (("of_two", perfagent.ddp), ("sharded", perfagent.fsdp)):
        loop = checkpointed(wrap(net()), FOLDER / name)
        train_sampled(loop, sampled(rank, 2), steps=2)
        loop.checkpoint.save_loop(loop)  # type: ignore[union-attr]
        said[name] = flat(loop.model)
    return said


def out_of_memory(rank: int) -> dict[str, Any]:
    """Only rank 1 runs out of memory."""
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    inputs, targets = torch.randn(16, 4).double(), torch.randn(16, 2).double()

    def gradients() -> torch.Tensor:
        return torch.cat([p.grad.flatten().clone() for p in plain.parameters() if p.grad is not None])

    def whole(rows: int) -> torch.Tensor:
        """Gradients of a single process."""
        plain.zero_grad()
        (plain(inputs[:rows]) - targets[:rows]).square().mean().backward()
        found = gradients()
        plain.zero_grad()
        return found

    def compute(piece: Batch) -> torch.Tensor:
        loss = (model(piece[0]) - piece[1]).square().mean()
        if rank == 1 and len(piece[0]) > 2:
            loss.backward()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    expected = whole(16)
    model = nn.parallel.DistributedDataParallel(plain)
    training = perfagent.loop(model, torch.optim.SGD(model.parameters(), lr=0.1))
    split = perfagent.SplitOnOom(training)
    mine = inputs[8 * rank : 8 * rank + 8], targets[8 * rank : 8 * rank + 8]
    split.backward(mine, compute)
    found = gradients()
    training.step()
    _run(training, [mine], 2)  # an ordinary step afterwards still averages by itself
    after = flat(plain)
    # a loader without a length, of which nobody knows whether the ranks' are equal
    for _ in training.batches(iter([None])):
        split.backward(mine, compute)
        training.step()
    said = {"pieces": split.pieces, "gradients": found.tolist(), "after": after, "stream_moved": flat(plain) != after}
    of_all = whole(12)
    start, rows = 4 * rank, 4 * rank + 4  # ranks of unequal batches
    counted = perfagent.SplitOnOom(training, items=lambda piece: len(piece[0]))
    counted.backward((inputs[start : start + rows], targets[start : start + rows]), compute)
    return said | {
        "off": float((found - expected).abs().max()),
        "off_by_items": float((gradients() - of_all).abs().max()),
    }


FOLDER = Path()
CASES = (
    engine_options, same_training, reductions, uneven_loaders, refusals, skipping_together, going_on, other_ranks,
    out_of_memory,
)  # fmt: skip


def main() -> None:
    global FOLDER
    folder = FOLDER = Path(sys.argv[1])
    torch.set_num_threads(1)
    import deepspeed

    other = os.fork()  # here, so that deepspeed is imported once
    rank = "0" if other else "1"
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
    dist.init_process_group("gloo")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles C++ for a minute
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", dist_init_required=False)
    said = {case.__name__: case(dist.get_rank()) for case in CASES}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(said))
    dist.barrier()
    os._exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) if other else 0)


if __name__ == "__main__":
    main()
