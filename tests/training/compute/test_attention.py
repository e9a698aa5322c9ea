"""`best_attention` against what torch really runs: each call is made under torch's own recording, which names the
kernel."""

from __future__ import annotations

import contextlib
import itertools
import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

import perfagent
from perfagent.errors import ConfigError
from perfagent_loop.compute.attention_rules import Gpu

KERNEL = re.compile(r"aten::_scaled_dot_product_(?:attention_)?(flash|efficient|cudnn|math)")


def kernel_that_ran(q, k, v, **arguments):
    """The name of the kernel in torch's record of the call's operators; "none" where it raised."""
    with contextlib.suppress(RuntimeError), torch.autograd.profiler.profile(use_kineto=False) as record:
        scaled_dot_product_attention(q, k, v, **arguments)
    return next((found[1] for event in record.function_events if (found := KERNEL.match(event.name))), "none")


def tensors(
    batch=2, heads=4, length=6, width=8, *, keys=None, key_heads=None, value_width=None, dtype=torch.float32, grad=False
):
    of_keys = (batch, key_heads or heads, keys or length)
    shapes = [(batch, heads, length, width), (*of_keys, width), (*of_keys, value_width or width)]
    return [torch.randn(shape, dtype=dtype).requires_grad_(grad) for shape in shapes]


def agree(q, k, v, *, causal=False, mask=None, dropout=0.0, gqa=False):
    """The choice, which draws no random number, is what runs then."""
    before = torch.get_rng_state()
    choice = perfagent.best_attention(q, k, v, causal=causal, mask=mask, dropout=dropout, gqa=gqa)
    assert torch.equal(before, torch.get_rng_state())
    ran = kernel_that_ran(q, k, v, is_causal=causal, attn_mask=mask, dropout_p=dropout, enable_gqa=gqa)
    # math then finds shapes that do not fit
    assert choice.kernel == ran or (ran == "none" and choice.kernel == "math"), str(choice)
    return choice


def test_the_kernel_named_is_the_kernel_that_runs():
    """And the rules alone would have chosen the same one, over 300 random calls."""
    generator = torch.Generator().manual_seed(5)

    def pick(*values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    kernels = set()
    for _ in range(300):
        q, k, v = tensors(
            pick(1, 2), pick(1, 2, 4), pick(0, 1, 3, 8), pick(1, 7, 8, 300), keys=pick(None, 5),
            key_heads=pick(None, None, 1, 2), value_width=pick(None, None, 8), grad=pick(False, True),
            dtype=pick(torch.float32, torch.bfloat16, torch.float64, torch.float16),
        )  # fmt: skip
        if pick(False, False, True):
            q = q.transpose(-1, -2).contiguous().transpose(-1, -2)
        causal, mask = pick(False, True), None
        if not causal and pick(False, True):
            shape = pick((1, 1), (q.shape[-2], k.shape[-2]), (1, 1, q.shape[-2], 1))
            mask = pick(torch.ones(shape, dtype=torch.bool), torch.zeros(shape, dtype=q.dtype))
        with contextlib.suppress(ConfigError):
            choice = agree(q, k, v, causal=causal, mask=mask, gqa=pick(False, True), dropout=pick(0.0, 0.0, 0.5))
            assert (choice.kernel == "math") == bool(choice.obstacles), str(choice)
            kernels.add(choice.kernel)
    assert kernels == {"flash", "math", "none"}


LEARNED = torch.zeros(6, 6)
WIDE, OF_EACH = tensors(value_width=16), torch.ones(2, 6, 6, dtype=torch.bool)
SPREAD = [t.transpose(-1, -2) for t in tensors(length=8)]


@pytest.mark.parametrize(
    ("says", "given", "options", "cured", "then"),
    [
        ("dropout", tensors(), {"dropout": 0.1}, tensors(), {}),
        ("dimensions", [t[0] for t in tensors()], {}, tensors(1), {}),
        ("shape", tensors(2, 2), {"mask": OF_EACH}, tensors(2, 2), {"mask": OF_EACH[:, None]}),
        ("learned", tensors(), {"mask": LEARNED.clone().requires_grad_()}, tensors(), {"mask": LEARNED}),
        ("wide", WIDE, {}, [pad(t, (0, 16 - t.shape[-1])) for t in WIDE], {}),
        ("strides", SPREAD, {}, [t.contiguous() for t in SPREAD], {}),
        ("samples", [tensors()[0], *(t[:1] for t in tensors()[1:])], {}, tensors(), {}),
        ("heads", tensors(key_heads=1), {}, tensors(key_heads=1), {"gqa": True}),
    ],
)
def test_what_keeps_flash_away_is_named_and_its_remedy_works(says, given, options, cured, then):
    choice = agree(*given, **options)
    assert choice.kernel == "math"
    assert says in choice.why
    assert choice.change
    assert choice.score_bytes == given[0][..., 0].numel() * given[1].shape[-2] * 4
    assert not choice.fused
    assert agree(*cured, **then).kernel == "flash"


def test_autocast_decides_by_the_type_it_casts_to():
    q, k, v = tensors()
    half = v.to(torch.bfloat16)
    with pytest.raises(ConfigError, match="one type"):
        perfagent.best_attention(q, k, half)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert agree(q, k, half).kernel == "flash"


@pytest.mark.parametrize(
    ("allowed", "dropout", "kernel"),
    [(SDPBackend.MATH, 0.0, "math"), (SDPBackend.FLASH_ATTENTION, 0.1, "none")],
)
@pytest.mark.filterwarnings("ignore:Flash attention kernel not used", "ignore:Both fused kernels do not support")
def test_a_switched_off_kernel_is_said_to_be_so(allowed, dropout, kernel):
    with sdpa_kernel([allowed]):
        choice = agree(*tensors(), dropout=dropout)
    assert (choice.kernel, "switched off" in choice.why) == (kernel, True)


CAUSAL = torch.ones(8, 8, dtype=torch.bool).tril()
PADDED = (torch.arange(8) < torch.tensor([[8], [5]]))[:, None, None, :]


def documents(*lengths):
    return torch.block_diag(*(torch.ones(length, length) for length in lengths)).bool()


@pytest.mark.parametrize(
    ("mask", "advice"),
    [
        (torch.ones(8, 8, dtype=torch.bool), "leave the mask out"),
        (CAUSAL, "is_causal=True instead"),
        (documents(3, 5) & CAUSAL, "packed_attention(q, k, v, lengths=[3, 5], causal=True)"),
        (documents(1, 2, 1, 1, 3), "lengths=[1, 2, 1, 1, ...], causal=False"),
        (PADDED, "pack the samples"),
        (PADDED & CAUSAL, "is_causal=True and leave the mask out"),
        (PADDED.flip(3) & CAUSAL, "pack the samples"),
        (torch.eye(8, dtype=torch.bool) | torch.eye(8, dtype=torch.bool).roll(3, 0), ""),
    ],
)
def test_a_mask_that_says_what_a_flag_says_is_recognized(mask, advice):
    for given in (mask, torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))):
        choice = agree(*tensors(2, 4, 8, 8), mask=given)
        assert choice.kernel == "flash"
        assert advice in choice.change
        assert bool(choice.change) == bool(advice)


def test_a_bias_is_no_mask():
    slopes = -0.1 * (torch.arange(8)[:, None] - torch.arange(8)[None, :]).abs().float()
    assert agree(*tensors(2, 4, 8, 8), mask=slopes).change == ""
    assert "flex_attention" in agree(*tensors(2, 4, 8, 8), mask=slopes.requires_grad_(True)).change


A100, L4, H100, B200, V100 = ((8, 0), (8, 9), (9, 0), (10, 0), (7, 0))
MASK = torch.ones(6, 6, dtype=torch.bool, device="meta")
CUDNN, OLD = {"cudnn": 91900}, {"cudnn": 91900, "version": (2, 11)}
"""OLD: torch 2.11, as seen on an H200."""


@pytest.mark.parametrize(
    ("kernel", "says", "capability", "given"),
    [
        ("flash", "first that torch tries", A100, {}),
        ("efficient", "flash computes in float16 or bfloat16", A100, {"dtype": torch.float32}),
        ("efficient", "compute capability 8.0", V100, {"dtype": torch.float16}),
        ("math", "multiple of 8", A100, {"width": 260}),
        ("efficient", "backward", L4, {"width": 240, "grad": True, "dropout": 0.1}),
        ("efficient", "lower right", A100, {"causal": True, "keys": 5}),
        ("math", "enable_gqa", A100, {"key_heads": 2}),
        ("cudnn", "first", H100, CUDNN),
        ("flash", "first", H100, {"cudnn": 91400}),
        ("cudnn", "first", B200, CUDNN | {"mask": MASK}),
        ("flash", "steps of 1/16", H100, CUDNN | {"dropout": 0.1}),
        ("cudnn", "first", H100, OLD | {"dropout": 0.1}),
        ("flash", "up to a width of 128", H100, CUDNN | {"width": 136}),
    ],
)
def test_the_kernel_on_another_gpu_follows_torch_s_conditions(kernel, says, capability, given):
    gpu = Gpu(capability=capability, cudnn=given.get("cudnn", 0), torch_version=given.get("version", (2, 13)))
    options = {name: given[name] for name in ("causal", "mask", "dropout", "gqa") if name in given}
    shape = {name: given[name] for name in ("width", "grad", "keys", "key_heads") if name in given}
    q, k, v = (t.to("meta") for t in tensors(dtype=given.get("dtype", torch.bfloat16), **shape))
    choice = perfagent.best_attention(q, k, v, gpu=gpu, **options)
    assert choice.kernel == kernel, str(choice)
    assert says in str(choice) + " ".join(o.why + o.change for found in choice.obstacles.values() for o in found)
    assert choice.predicted


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_this_gpu_the_kernel_named_is_the_kernel_that_runs():
    for dtype, grad, causal, dropout in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16), (False, True), (False, True), (0.0, 0.1, 0.125)
    ):
        for size in ((2, 4, 128, 64), (2, 4, 64, 200), (1, 2, 33, 7), (2, 2, 16, 300)):
            q, k, v = (t.detach().cuda().requires_grad_(grad) for t in tensors(*size, dtype=dtype))
            choice = agree(q, k, v, causal=causal, dropout=dropout)
            by_rules = perfagent.best_attention(q, k, v, causal=causal, dropout=dropout, gpu=Gpu.here(q.device))
            assert by_rules.kernel == choice.kernel, f"{choice} / {by_rules}"
