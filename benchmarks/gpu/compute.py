"""What runs on this GPU is what perfagent said: attention kernels, packed attention, activations computed again."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from report import Result
from stage import Stage
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import perfagent
from perfagent_loop.compute.attention import AttentionChoice, Gpu
from perfagent_loop.compute.packed import packed_attention

KERNELS = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
}
SIZES = ((2, 4, 128, 64), (2, 4, 64, 128), (1, 2, 33, 7), (2, 2, 16, 200), (2, 2, 16, 256), (1, 2, 8, 264))


def check(stage: Stage) -> list[Result]:
    return [*_kernels(stage), *_packed(stage), *_checkpointing(stage)]


# ---- attention


def ran(q: Any, k: Any, v: Any, **arguments: Any) -> str:
    """The kernel in torch's own record of the call."""
    with torch.autograd.profiler.profile() as profile:
        try:
            scaled_dot_product_attention(q, k, v, **arguments)
        except RuntimeError:
            return "none"
    found = [KERNELS[event.key] for event in profile.key_averages() if event.key in KERNELS]
    return found[0] if found else "none"


def _kernels(stage: Stage) -> list[Result]:
    named = rules = total = 0
    wrong: list[str] = []
    kinds: set[str] = set()
    grid = itertools.product(
        SIZES,
        (torch.float32, torch.bfloat16, torch.float16),
        (False, True),
        (None, "causal", "mask"),
        (0.0, 0.1, 0.125),
    )
    for size, dtype, grad, how, dropout in grid:
        q, k, v = (torch.randn(size, dtype=dtype, device=stage.device, requires_grad=grad) for _ in range(3))
        causal = how == "causal"
        mask = torch.ones(size[2], size[2], dtype=torch.bool, device=stage.device).tril() if how == "mask" else None
        choice = perfagent.best_attention(q, k, v, causal=causal, mask=mask, dropout=dropout)
        kernel = ran(q, k, v, is_causal=causal, attn_mask=mask, dropout_p=dropout)
        total += 1
        kinds.add(kernel)
        named += choice.kernel == kernel
        by_rules = choice.kernel if stage.dry else _predicted(q, k, v, causal, mask, dropout).kernel
        rules += by_rules == kernel
        if kernel not in (choice.kernel, by_rules):
            wrong.append(f"{size} {dtype} {how} {dropout}: {kernel}")
    note = "; ".join(wrong[:3])
    return [
        Result(
            "the attention kernel that was named is the one that ran", f"{total} of {total}", f"{named} of {total}",
            "pass" if named == total else "FAIL", note or f"kernels: {', '.join(sorted(kinds))}",
        ),
        Result(
            "... by the conditions alone, as for a GPU elsewhere", f"{total} of {total}", f"{rules} of {total}",
            "pass" if rules == total else "FAIL", note,
        ),
    ]  # fmt: skip


def _predicted(q: Any, k: Any, v: Any, causal: bool, mask: Any, dropout: float) -> AttentionChoice:
    return perfagent.best_attention(q, k, v, causal=causal, mask=mask, dropout=dropout, gpu=Gpu.here(q.device))


def _packed(stage: Stage) -> list[Result]:
    """Variable-length attention and the block-diagonal mask, forward and backward, as a share of the largest number."""
    lengths = [5, 1, 64, 64, 37]
    torch.manual_seed(0)
    dtype = torch.float32 if stage.dry else torch.bfloat16
    q, k, v = (
        torch.randn(sum(lengths), heads, 64, dtype=dtype, device=stage.device, requires_grad=True)
        for heads in (8, 2, 2)
    )
    results = {}
    for method in ("auto", "mask"):
        out = packed_attention(q, k, v, lengths, method=method)
        results[method] = [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]
    off = max(
        float((one - other).abs().max() / other.abs().max())
        for one, other in zip(results["auto"], results["mask"], strict=True)
    )
    how = "each document alone" if stage.dry else "the variable-length kernel"
    return [
        Result(
            f"packed attention by {how} and by the mask, forward and backward", "within 2 %", f"{100 * off:.2g} % apart",
            "pass" if off < 0.02 else "FAIL",
        )
    ]  # fmt: skip


# ---- activations


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.dropout(self.down(gelu(self.up(self.norm(x)))), 0.1, train=True)


def _checkpointing(stage: Stage) -> list[Result]:
    width, rows = (32, 16) if stage.dry else (1024, 16384)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(8))).to(stage.device)
    x = torch.randn(rows, width, device=stage.device)
    plain, peak = _trained(stage, model, x, None)
    found = []
    for mode in ("all", "every:2", "selective"):
        losses, lower = _trained(stage, model, x, mode)
        saved = "not measured" if stage.dry else f"activations {100 * (1 - lower / peak):.0f} % smaller"
        found.append(
            Result(
                f"losses with checkpoint_activations({mode!r})", "the same, bit by bit",
                "the same" if losses == plain else "others", "pass" if losses == plain else "FAIL", saved,
            )
        )  # fmt: skip
    return found


def _trained(stage: Stage, model: nn.Module, x: torch.Tensor, mode: str | None) -> tuple[list[float], int]:
    """(losses of five steps, bytes of the peak beyond the weights, gradients and optimizer)"""
    model = copy.deepcopy(model)
    if mode:
        perfagent.checkpoint_activations(model, mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    losses = []
    held = peak = 0
    for _ in range(5):
        if not stage.dry:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if not stage.dry:
            peak = torch.cuda.max_memory_allocated() - held
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
    return losses, peak
