"""The matrix of docs/evidence/compatibility.md: which loop is trained for each row, and what of it must be captured.

test_matrix.py trains every row, and scripts/compatibility writes the table. This module knows no framework: it is data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

COLUMNS = {
    "steps": "Steps",
    "loss": "Loss",
    "lr": "Rate",
    "grad/norm": "Norm",
    "samples_per_s": "Samples/s",
    "tokens_per_s": "Tokens/s",
    "phase/data_s": "Data",
    "phase/forward_s": "Forward",
    "phase/backward_s": "Backward",
    "phase/optimizer_s": "Optimizer",
    "amp": "Scale, skipped",
    "end": "End",
    "one run": "One run",
    "bit-equal": "Bit-equal",
}
"""Column -> heading. Names of series are those of the catalogue."""

REASONS = {
    "no loader": "the script has no DataLoader",
    "no tokens": "the batches are no tokens",
    "full precision": "nothing is scaled",
    "one process": "there is one process",
    "no training": "the script has no optimizer, backward pass or batches",
}
"""Why there is nothing to capture."""

_NO_TOKENS = {"tokens_per_s": "no tokens"}
_NO_LOADER = {"phase/data_s": "no loader"}
_FULL = {"amp": "full precision"}
_ALONE = {"one run": "one process"}
_NO_TRAINING = dict.fromkeys(
    ("lr", "grad/norm", "samples_per_s", "phase/forward_s", "phase/backward_s", "phase/optimizer_s"), "no training"
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One real training. absent: column -> key of REASONS; the test demands that nothing is captured there.

    ranks: processes over gloo. sharded: each rank holds a part of the gradients, and the parts, squared and added, are
    the norm. norm_from: the first step whose norm is known. since: the first torch that has what the training uses.
    """

    family: str
    name: str
    module: str
    function: str
    options: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    absent: dict[str, str] = field(default_factory=dict)
    sharded: bool = False
    norm_from: int = 1
    since: tuple[int, int] = (2, 4)

    def exists_in(self, torch: str) -> bool:
        """Whether this version of torch, such as 2.13.0+cpu, can run the training."""
        return tuple(map(int, torch.split(".")[:2])) >= self.since

    @property
    def id(self) -> str:
        return "-".join([self.module, self.function, *self.options.values()])


PLAIN, COMPILE, PRECISION, SEVERAL = "Plain torch", "torch.compile", "Mixed precision", "Several models or optimizers"
PARALLEL, DEEPSPEED, TRAINERS = "torch.distributed, two ranks", "DeepSpeed, two ranks", "Trainers"


def _row(
    family: str, name: str, module: str, function: str, absent: dict[str, str] = _NO_TOKENS | _FULL, **more: Any
) -> Row:
    ranks = 2 if family in (PARALLEL, DEEPSPEED) else 1
    absent = absent if ranks > 1 else absent | _ALONE
    return Row(family=family, name=name, module=module, function=function, absent=absent, ranks=ranks, **more)


ROWS = (
    _row(PLAIN, "DataLoader, AdamW, clipping, scheduler", "plain", "loader_and_scheduler"),
    _row(PLAIN, "own batches of tokens, SGD, attach(model)", "plain", "own_batches", _FULL | _NO_LOADER),
    _row(PLAIN, "accumulation, loss divided, short last window", "plain", "accumulation_divided"),
    _row(PLAIN, "accumulation, loss as it is", "plain", "accumulation_plain"),
    _row(PLAIN, "evaluation in between", "plain", "evaluation_between"),
    _row(PLAIN, "LBFGS, closure", "plain", "closure", _NO_TOKENS | _FULL | _NO_LOADER),
    _row(PLAIN, "DataLoader with two workers", "plain", "loader_with_workers"),
    _row(PLAIN, "back to a checkpoint and on from there", "plain", "back_to_a_checkpoint"),
    _row(PLAIN, "a loss that becomes NaN", "plain", "becomes_nan"),
    _row(PLAIN, "no gradients (evolution strategy)", "plain", "without_gradients",
         _NO_TOKENS | _FULL | _NO_LOADER | _NO_TRAINING),
    _row(SEVERAL, "two optimizers, one loss", "several", "several_optimizers"),
    _row(SEVERAL, "Muon and AdamW, clipping", "several", "muon", since=(2, 9)),
    _row(SEVERAL, "two models, one optimizer", "several", "several_models"),
    _row(SEVERAL, "GAN", "several", "adversarial"),
    _row(PRECISION, "float16, GradScaler, an overflow", "precision", "half_with_scaler", _NO_TOKENS),
    _row(PRECISION, "bfloat16 autocast", "precision", "brain_float"),
    _row(COMPILE, "attached before", "compiled", "attached_before"),
    _row(COMPILE, "attached after", "compiled", "attached_after"),
    _row(COMPILE, "Inductor", "compiled", "attached_before", options={"backend": "inductor"}),
    _row(TRAINERS, "Transformers Trainer, evaluation", "hf_trainer", "train", _FULL),
    _row(TRAINERS, "Transformers Trainer, accumulation", "hf_trainer", "train", _FULL, options={"accumulate": "2"}),
    _row(TRAINERS, "Lightning, accumulation, clipping", "with_lightning", "automatic",
         options={"accumulate": "4", "clip": "0.5"}),
    _row(TRAINERS, "Lightning, accumulation", "with_lightning", "automatic", options={"accumulate": "2"}),
    _row(TRAINERS, "Lightning, manual", "with_lightning", "manual"),
    _row(TRAINERS, "Accelerate, accumulate()", "with_accelerate", "accumulate"),
    _row(PARALLEL, "DDP", "parallel", "data_parallel"),
    _row(PARALLEL, "DDP, no_sync, clipping", "parallel", "data_parallel_accumulation"),
    _row(PARALLEL, "DDP, torch.compile", "parallel", "data_parallel", options={"compiled": "yes"}),
    _row(PARALLEL, "FSDP2", "parallel", "fully_sharded", sharded=True, since=(2, 7)),
    _row(PARALLEL, "FSDP2, clipping", "parallel", "fully_sharded",
         options={"clip": "0.5"}, sharded=True, norm_from=2, since=(2, 7)),
    _row(PARALLEL, "FSDP2, two optimizers", "parallel", "fully_sharded_in_parts", sharded=True, since=(2, 7)),
    _row(PARALLEL, "FSDP2, two optimizers, one of replicated parameters", "parallel", "fully_sharded_beside_replicated",
         sharded=True, since=(2, 7)),
    _row(PARALLEL, "FSDP (first version), sharded gradients", "parallel", "first_version",
         options={"strategy": "SHARD_GRAD_OP"}, sharded=True),
    _row(PARALLEL, "FSDP (first version), its clipping", "parallel", "first_version",
         options={"strategy": "FULL_SHARD", "clip": "0.5"}),
    _row(DEEPSPEED, "ZeRO-1, clipping", "zero", "zero", options={"stage": "1"}),
    _row(DEEPSPEED, "ZeRO-2, accumulation, clipping", "zero", "zero", options={"stage": "2", "windows": "2"}),
    _row(DEEPSPEED, "ZeRO-3, clipping", "zero", "zero", options={"stage": "3"}),
    _row(DEEPSPEED, "no ZeRO", "zero", "zero", options={"stage": "0"}),
    _row(DEEPSPEED, "ZeRO-2, bfloat16, its scheduler", "zero", "zero_brain_float"),
    _row(DEEPSPEED, "ZeRO-1, float16, overflows", "zero", "zero_half", _NO_TOKENS),
    _row(DEEPSPEED, "ZeRO-1, GAN of two engines", "zero", "zero_adversarial"),
)  # fmt: skip
