"""docs/evidence/compatibility.md, put together of sections. Started by scripts/compatibility.

A section is a function that gives its text, named in SECTIONS. What another script measures for a section of its own, it
keeps in a file of docs/, so that every section can be written anew without measuring.
"""

# ruff: noqa: E501 - a row of a table is one line

from __future__ import annotations

from pathlib import Path

from agent.frameworks.matrix import COLUMNS, REASONS, ROWS
from versions.section import kept, written

__all__ = ["PAGE", "document"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "compatibility.md"

_TITLE = """\
# Compatibility

Written by `scripts/compatibility` from the matrix that the tests run (tests/agent/frameworks/matrix.py); do not edit by hand.
"""


def document() -> str:
    """The whole page."""
    return "\n".join([_TITLE, *(section() for section in SECTIONS)])


def trainings() -> str:
    """The matrix of tests/agent/frameworks."""
    letters = {reason: chr(ord("a") + place) for place, reason in enumerate(REASONS)}
    lines = [f"| | {' | '.join(COLUMNS.values())} |", f"|---|{'---|' * len(COLUMNS)}"]
    family = ""
    for row in ROWS:
        if row.family != family:
            family = row.family
            lines.append(f"| **{family}** |{' |' * len(COLUMNS)}")
        cells = [letters[row.absent[column]] if column in row.absent else "yes" for column in COLUMNS]
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    notes = "  \n".join(f"{letter}: {REASONS[reason]}" for reason, letter in letters.items())
    return f"{_TRAININGS}\n{table}\n\n{notes}\n\n\n{_ELSEWHERE}"


def versions() -> str:
    return written(kept())


def gpus() -> str:
    return _GPUS


def devices() -> str:
    return _DEVICES


def libraries() -> str:
    return _LIBRARIES


def limits() -> str:
    return _LIMITS


_TRAININGS = """\
Every row is a real training of a few steps, which runs twice: without the agent and with it. **A test checks every cell**:
tests/agent/frameworks/test_matrix.py compares the values that perfagent recorded with those that the script itself knows. *yes* means
that perfagent recorded the right value. A letter means that the training has no such value (the reason is below the table), and
that perfagent recorded none.

| column | what *yes* means |
|---|---|
| Steps | every optimizer step has its number, from 1 on without a gap, also those that a scaler skipped |
| Loss | the loss of every step, bit-equal to the script's; to 1 part in 10⁶ if micro-batches are summed in another order |
| Rate | the learning rate of every step |
| Norm | the norm of all gradients of the main optimizer (and of other optimizers on the same backward pass), after unscaling and before clipping, to 1 part in 10⁵; with DDP, FSDP2 and ZeRO, the norm that one process computes on the joined batches |
| Samples/s, Tokens/s | multiplied by the step time, exactly what the script consumed |
| Data, Forward, Backward, Optimizer | the time of the phase in every step from the second on; with communication, evaluation and the rest they add up to the step time, to 5 % |
| Scale, skipped | the loss scale of every step and the number of skipped steps, exactly |
| End | the run is `finished` when the script is |
| One run | all ranks are one run, each with its own rank, and node samples come from one of them |
| Bit-equal | losses, learning rates, norms, final weights, the state of both random generators and (with torch.compile) the number of graphs are the same without the agent and with it |
"""
_ELSEWHERE = """\
Launchers (`torchrun`, `deepspeed`, SLURM, Open MPI) have tests of their own: tests/agent/frameworks/test_launchers.py. Another test
compares the phases with the timers of scripts: tests/e2e/test_foreign_scripts.py. Not tried: real accelerators here (docs/evidence/gpu.md),
DeepSpeed's pipeline engine, ZeRO offload, Megatron.
"""
_GPUS = """\
## GPU figures by vendor

NVIDIA's figures come from NVML, and were compared with `nvidia-smi` on a card ([gpu.md](gpu.md)). Those of AMD and Intel come from the
files of the kernel's drivers, without a library and without root. **They were not yet seen on a card**: tests read trees of files that
are made from the kernel's documentation (tests/kernel_trees.py names each source). A figure that a driver does not give is absent.

| figure (`gpu/...`) | NVIDIA (NVML) | AMD (amdgpu) | Intel (i915, xe) |
|---|---|---|---|
| `utilization_pct` | time in which a kernel ran | load that the firmware computes | of this process alone, of its own board: the busiest engine that computes |
| `memory_busy_pct` | yes | yes | no |
| `memory_used_bytes` | yes | yes | no |
| `memory_total_bytes` | yes | yes | xe, with what the firmware reserves |
| `power_w`, `power_limit_w` | yes | yes; of an MI250 the first die has that of both | discrete cards: from the energy counter, over half a second |
| `energy_j`, `energy_per_step_j` | since Volta | the sum of the power, read twice a second | discrete cards |
| `temperature_c` | core | edge; junction where there is no edge (MI300) | package: xe since Linux 6.15, i915 since 6.12 |
| `memory_temperature_c` | yes | yes | xe since Linux 6.15 |
| `sm_clock_mhz` | yes | yes | first tile |
| `memory_clock_mhz`, `fan_pct` | yes | yes | no |
| `throttle_*_pct` | six reasons | no | no |
| `ecc_*`, `retired_pages_double` | yes | `ecc_*_volatile` of all blocks with RAS; reserved pages | no |
| `pcie_replays` | yes | yes | no |
| PCIe link and traffic, NVLink or its like, activity of units | yes | no | no |
| `process_memory_bytes` | yes | yes, by /proc/self/fdinfo | yes, by /proc/self/fdinfo |
| `process_utilization_pct` | yes | no: ROCm's work does not pass through the kernel | yes, by /proc/self/fdinfo |
| use by other processes; errors as events (Xid) | yes | no | no |

- Which board is a rank's: by the UUID or the PCI address that torch tells of its device. Where torch tells neither, the board is known
  if it is the machine's only one. Otherwise its figures are reported as `node_gpu<i>/*`.
- A board in partitions (MI300 as DPX or CPX), or one of whose tiles each is a device (Data Center GPU Max), is no single rank's: it is
  reported as `node_gpu<i>/*`.
- On a machine with an NVIDIA driver, boards of other vendors are not looked for. Graphics that are part of an Intel processor are reported
  only where a rank computes on them.

"""
_LIBRARIES = """\
**Other libraries.** On 24 November 2026, small trainings with the libraries below ran with and without the agent. Their results were
bit-equal, and perfagent's figures were compared with what the scripts counted. Faults that were found are repaired, or listed below.
`scripts/libraries` repeats many of these trainings: [libraries.md](libraries.md).

| kind | tried |
|---|---|
| language | sentence-transformers 6.2, trl 1.16 (SFT, DPO, GRPO, reward models), peft 0.21 and Transformers 5.23 with their options, a diffusers loop, accumulation as in open_clip, cached gradients |
| loops and optimizers | ignite, fastai, skorch, torchtnt, poutyne, monai, speechbrain, mmengine, catalyst, Fabric, timm, 22 optimizers |
| domains | Ultralytics, Stable-Baselines3, tianshou, torchrl, d3rlpy, Pyro, gpytorch, botorch, torch_geometric, torchdiffeq, nflows, pytorch-forecasting, darts, neuralforecast, recbole |
| schemes | k-fold, Optuna, federated averaging, MAML, physics-informed networks |
"""
_DEVICES = """\
## Kinds of device

`perfagent.device` asks each kind by torch's own module for it. *Times*: the phases of a step by events on the device, copies
(`phase/h2d_s`) and communication included. *Memory*: the series `cuda/*` of torch's allocator, which have this name for every kind.
*Graphs*: what happens while the script captures one; the agent adds nothing to it. *Out of memory*: what filled the memory, by torch's
exception or its text. The figures of the boards themselves (`gpu/*`) come from the driver (next section).

| kind | values | times | memory | graphs | out of memory | name | seen on a card |
|---|---|---|---|---|---|---|---|
| NVIDIA (`cuda`) | pinned copy, event | yes | all of `cuda/*` | values are read meanwhile: the sender's thread is kept out of the capture | yes, with segments | yes | [H200](gpu.md) |
| AMD (`cuda`, ROCm) | pinned copy, event | yes | all of `cuda/*` | as NVIDIA, by HIP's function | yes, with segments | yes | not yet seen on a card |
| Intel (`xpu`) | pinned copy, event | yes, with oneAPI 2025 or later; else none | what torch.xpu counts | values are read after the capture | yes, with segments | yes | not yet seen on a card |
| Huawei (`npu`, torch_npu) | pinned copy, event | yes | what torch_npu counts | values are read after the capture | yes | yes | not yet seen on a card |
| another PrivateUse1 backend | pinned copy, event, or a copy on the device | if its module has `Event` and `current_stream` | what its module counts | values are read after the capture | yes | if its module has it | tests have one of their own |
| Apple (`mps`) | the sender's thread waits for them | none: its `elapsed_time` waits for the device | allocated and reserved | there are none | yes, by the text | no | not yet seen on a card |
| XLA and others without a module | the sender's thread waits for them | none | none | not known | no | no | not yet seen on a card |

Where a kind has no times, a step has its duration and its data wait, and no `phase/forward_s`, `phase/backward_s` or `phase/optimizer_s`:
the time that the host takes to launch work is no time of the device. perfagent finds lines that wait for the device on `cuda` only.
"""
_LIMITS = """\
Known limits:

- **Gradient norm, how often.** These tests measure the norm in every step. A real job measures it as often as the overhead budget
  allows, unless clipping or DeepSpeed computes it anyway. FSDP2 with clipping has a norm from its second step on. So has FSDP's first
  version if `torch.nn.utils.clip_grad_norm_`, which sees one rank's pieces, clips it. With
  `zero_optimization.compute_grad_norm: false` DeepSpeed computes no norm, and perfagent reports none.
- **Steps captured in a graph.** A replay of a whole step (`torch.cuda.CUDAGraph`) is a step with its time. Its phases are unknown, its
  gradients are measured only if they outlive the step, and its loss is what the script logs: `run.log({"loss": static_loss})`.
- **FLOPs.** There is no count, so no `flops_per_s` and no `mfu`, if a frozen convolution is called as a function or is compiled, and
  after `backward(create_graph=True)`. Attention that is not one fused kernel (dropout on the CPU, a model's own products) counts in
  full where it is causal, too.
- **Dead units.** The units of an activation module that is called several times in one call of the model are those of its first call.
- **Batches.** Nested tensors have no samples and no tokens. Padding is known from `attention_mask`, a `padding_mask`, `lengths`, or
  the model's padding token; masks and lengths of other names, or without one, are not read.
- **Parameters that stand still.** A table of embeddings that receives gradients does not count.
- **The operator of a NaN on a GPU** is read from the graph of the step after it. It is named if the weights were kept good
  (GradScaler, a guard of the loop), or if only one operator can make NaN. A loss that arrives before the update of its step has its
  batch and parameters checked in full. One that arrives later, as with torch.compile in long steps, has those inputs that the model
  is called with by themselves, not in a dict, and 16 small parameters: dense ones of one type, no shards of FSDP2.
- **The module of a NaN** that comes back is found by the outputs of the next three steps, unless something was compiled. What a module
  gets by keyword is not checked. A batch that holds NaN, which the loop leaves out, is named before an operator that makes one.
- **Gradient norm with FSDP.** perfagent assumes that tensors which FSDP does not shard are the same on all ranks. Experts that differ
  from rank to rank, as plain tensors next to sharded ones, make the norm wrong.
- **Loss with accumulation.** If the script divides the loss by the number of micro-batches, perfagent sums the micro-batches. If the
  script divides by the items of each micro-batch (a masked mean), perfagent averages them. Accelerate divides a short last window by
  the full number, and perfagent reports that loss, which is the one that Accelerate minimizes.
- **Pipeline schedules** (torch.distributed.pipelining). The last stage reports the loss, as the mean over the micro-batches. Each
  stage reports the norm of its own gradients (tests/agent/frameworks/test_pipelining.py).
- **Truncated backpropagation through time.** If a script takes a step for each part of a batch, perfagent counts the first part of
  the first batch as the whole batch.
- **Ranks that a script starts itself** (multiprocessing) belong to one run under `perfagent run`. With `attach()` they belong to one
  run too, whether `attach()` comes before or after `init_process_group`. If you start ranks by hand without a launcher's variables,
  call `attach()` after `init_process_group`.
- **A script that starts itself anew** (`os.execv`, to set `PYTHONHASHSEED` for example) is not recorded by `perfagent run`: call
  `attach()` in it.
- **A DeepSpeed configuration that is named on the command line** is not read as a file: perfagent records the engine's settings.
- **`wandb.restore`** gives None: perfagent has no store of files to restore from.
- **Control groups of version 1 beside version 2**: pressure is the host's.
- **Hosts with big-endian numbers** (s390x) are not supported: the agent writes the columns of a frame in the order of the host.
- **An outage that fills 80 % of `max_spool_bytes`** (a week of random numbers at 100 points per second): the samples of the oldest minutes go first, but
  for losses and gradients that are not finite; events go last. What goes is counted in `agent/dropped`.
- **Files of the spool that somebody deletes** while the training runs: what is in memory is written anew. Minutes of an outage that
  were in deleted files are counted in `agent/dropped` when their turn comes.
- **A fork within the microseconds in which the agent opens a socket** gives the child a copy of it: the server sees the end of that
  connection only once the child has ended.
- **A resolver that never answers** holds up delivery; what was measured is in the spool, for the next start or `perfagent sync`.
- **A recording that is synced again** to a server that refuses some of its frames: those stand in the recording's `quarantine` once
  for each `perfagent sync`, up to 16 MB.
- **Trainings in other processes.** `perfagent run` records the process that it starts, and the ranks that this process spawns. If it
  makes no step and starts other processes (a driver of several trainings, a script that forks its training), an info alert says so:
  put `perfagent run` before each command that trains, or call `attach()` in the function that trains. In a driver that imports torch,
  the alert counts what `multiprocessing` starts. In another one it counts every Python process that runs for ten seconds. How these
  ended is not known; if the driver itself ends well, its run is `finished`.
- **SLURM.** Under `srun` the run has the job's id, so a requeued job is a new attempt of it. Several trainings of one step
  (a shell that `srun` starts, with two commands of Python) would then be attempts of one run: give each its own `srun`, or its own
  PERFAGENT_RUN_ID. In a step with a terminal (`srun --pty bash`) each training is a run of its own.
  The nodes of a job that never starts torch.distributed agree on no attempt: after 120 s each node makes one of its own.
- **Large tensors on the CPU**: torch adds up the norm of a gradient in float32, so that `grad/norm` of a tensor of 60 million
  numbers is up to 0.5 % low.
- **Xid errors** come from NVML's events. Where the driver offers none (some containers, vGPU), a lost board is reported without its
  Xid: `dmesg` on the host has it.
- **macOS** (and other systems without /proc) has no figures of the host and of the process, but for the load, the number of cores
  and the process's CPU time.
- **Embeddings with `sparse=True`**: the table of memory counts their gradients as large as the table of the embedding.
- **Log calls before the first step.** A `log()` call without `step=` waits until the first step is known, or for 5 s. If `kill -9` ends
  the process meanwhile, the call is lost.
- **Ends that a process cannot report itself.** With `attach()` alone, a run whose process was ended by a signal (SIGTERM without a
  handler of yours, `kill -9`, a crash in C) or by `os._exit` is `lost`, with a critical alert after 30 s. A handler of Python's would
  delay the end until the interpreter runs, so perfagent installs none. `perfagent run` reports such an end at once.
- **multiprocessing.Pool** ends its workers by SIGTERM, also when their work is done. A run that a task attached therefore ends with
  that task. A run that the pool's `initializer` attached is `lost`: call `attach()` in the function that trains.
- **Recordings that are synced.** The server judges a recording in the frames in which it arrives, whole minutes at once and one
  rank after the other. What rules tell by the clock, or by comparing ranks (`straggler`), may then be missing.
  `perfagent diagnose FOLDER` judges the recording as the server would have judged the run live.
- **Several devices in one process.** Where the layers of a model lie on several devices, a phase lasts until the last of them is done.
  Where a process trains on one device after another, `gpu/*` stays with the board of the first. The step in which the loss moves to
  another device has no phases that lie on both.
- **NVML that a script shuts down.** A script that calls `nvmlShutdown` more often than `nvmlInit` ends it for the whole process, and
  with it the figures of the GPUs.
- **Several processes on one GPU.** NVML tells how busy the device is, not with whose work. `host_bound` and the bound in a verdict
  may then speak of work that another process gave it.
- **Resuming.** A Transformers Trainer or a Lightning training that resumes from its own checkpoint continues to count its steps from
  there, unless `start_step` says otherwise. Under the same run id its steps replace those that the previous attempt made after the
  checkpoint. A second training in the same process continues to count where the first ended.
- **Searches before the training.** The steps of Lightning's `lr_find` and `scale_batch_size`, of fastai's `lr_find` and of torch-lr-finder's
  `range_test` are not recorded: they belong to no training, and their loss diverges on purpose.
- **gevent.** After `monkey.patch_all()` the agent works only while the training sleeps or waits. With
  `monkey.patch_all(thread=False)` it works as usual.
- **One process is one run**, however many trainings it does, until `finish()`, an `attach()` with another
  name, or an `attach()` with a name and another model than the one that it has trained. Each job of Hydra's
  `--multirun` that calls `attach()` is a run of its own. If several threads train at the same time, perfagent records one of the
  trainings. Threads that take turns in one training (`asyncio.to_thread`), or follow each other, count as one; a step on another
  thread than the one before has its number and learning rate, but neither loss nor phases.
- **A vector of losses** that the script backpropagates with weights (`losses.backward(weights)`) is no loss: log it.
- **Adaptive clipping** (of timm) is not recognized: the gradients are measured after it.
- **Cached gradients** (sentence-transformers) with accumulation: the loss of a step is that of its last batch.
- **A closure that raises** within the optimizer's step, and is tried again: the loss of that step includes the first attempt.
- **Optimizers of your own class**: name them, `attach(model, optimizer=...)`. perfagent finds fastai's by itself. Keras 3 on torch
  has optimizers of another kind: perfagent records only what the script logs.
- **Gradients by `torch.autograd.grad` or `torch.func`**: perfagent records the steps, the learning rate and the norm, nothing else.
- **Samples are missing** for batches of torch_geometric's NeighborLoader and of recbole, for updates from a replay memory with more
  than two backward passes, and for adjoint equations; and for batches in a mapping of your own class that is neither a `dict` nor a
  `UserDict`.
- **Padding** counts by a mask, by the lengths of the sequences, or by the padding token of the model. Lengths without a name, in a
  tuple, are known after batches of three widths.
- **Evaluations and rollouts.** Calls of the model between steps count as an evaluation. They count as a rollout if the script stepped
  an environment of gymnasium, gym or Stable-Baselines3; an environment of your own class does not count. The evaluation of a model that
  no step calls (an average of the weights) is part of the next step, unless `with run.phase("eval"):` names it.
- **Models that return a loss.** Their call ends with the forward pass. If the loop computes another loss and trains on that one, the time
  of that is `other`.
- **Gradients clipped before the first step** of an optimizer that `attach` was not given: that step has the norm from clipping, and
  no norms of layers. After `clip_grad_value_` it has none.
- **Optimizers over the same parameters that step in turn**, each on a backward pass of its own: every step of each counts.
- **Other models that the loop calls** (a teacher, a discriminator). perfagent looks for them after the first step, and then once a
  minute. Until then the time of their calls is `other`. It watches at most 64 modules.
- **A second, smaller training in one process.** While the first training's optimizer exists, perfagent recognizes the second training
  only after up to 64 steps, which have numbers and no rows. It recognizes a second training of the same
  size after ten steps. If several shorter trainings run and all their optimizers exist, perfagent records the first.
- **Exit by `raise SystemExit(1)`.** With `attach()` alone the run is `finished`. With `sys.exit(1)`, or under `perfagent run`, it is
  `failed`. A script that catches what `sys.exit(1)` raises, and ends without more than one step after it, is `failed`, too.
"""

SECTIONS = (trainings, versions, devices, gpus, libraries, limits)


if __name__ == "__main__":
    PAGE.write_text(document(), "utf-8")
