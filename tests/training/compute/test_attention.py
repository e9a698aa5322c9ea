"""`best_attention` against what torch really runs: each call is made under torch's own recording, which names the
kernel."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import perfagent
from perfagent.errors import ConfigError
from perfagent.training.compute.attention_rules import AttentionCall, Gpu, Switches, default_order, obstacles

_OPERATORS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
}


def kernel_that_ran(q, k, v, **arguments):
    """The name of the kernel in torch's record of the call's operators; "none" where it raised."""
    profiler = torch._C._profiler
    config = profiler.ProfilerConfig(
        profiler.ProfilerState.CPU, False, False, False, False, False, profiler._ExperimentalConfig()
    )
    torch._C._autograd._enable_profiler_legacy(config)
    with contextlib.suppress(RuntimeError):
        scaled_dot_product_attention(q, k, v, **arguments)
    events = torch._C._autograd._disable_profiler_legacy()
    ran = [_OPERATORS[event.name()] for thread in events for event in thread if event.name() in _OPERATORS]
    return ran[0] if ran else "none"


def tensors(
    batch=2, heads=4, length=6, width=8, *, keys=None, key_heads=None, value_width=None, dtype=torch.float32, grad=False
):
    shapes = [
        (batch, heads, length, width),
        (batch, key_heads or heads, keys or length, width),
        (batch, key_heads or heads, keys or length, value_width or width),
    ]
    return [torch.randn(shape, dtype=dtype).requires_grad_(grad) for shape in shapes]


def agree(q, k, v, *, causal=False, mask=None, dropout=0.0, gqa=False):
    choice = perfagent.best_attention(q, k, v, causal=causal, mask=mask, dropout=dropout, gqa=gqa)
    ran = kernel_that_ran(q, k, v, is_causal=causal, attn_mask=mask, dropout_p=dropout, enable_gqa=gqa)
    assert choice.kernel == ran, str(choice)
    return choice


# ---- the kernel that runs on this CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad", [False, True])
def test_the_kernel_named_is_the_kernel_that_runs(dtype, grad):
    """Over a grid of shapes, masks, dropout and causality: 4 types x 2 x 60 calls."""
    seen = set()
    sizes = [(2, 4, 6, 8), (1, 1, 1, 1), (3, 2, 17, 5), (2, 4, 64, 300), (2, 4, 0, 8)]
    for size, causal, dropout in itertools.product(sizes, (False, True), (0.0, 0.3)):
        q, k, v = tensors(*size, dtype=dtype, grad=grad)
        length = size[2]
        seen.add(agree(q, k, v, causal=causal, dropout=dropout).kernel)
        if not causal and length:
            for shape in [(length, length), (2 if size[0] == 2 else 1, 1, length, length), (1, length)]:
                mask = torch.zeros(shape, dtype=dtype) if dropout else torch.ones(shape, dtype=torch.bool)
                seen.add(agree(q, k, v, mask=mask, dropout=dropout).kernel)
    assert seen == {"flash", "math", "none"}


@pytest.mark.parametrize(
    ("name", "says", "arguments"),
    [
        ("three dimensions", "dimensions", lambda: ([t[0] for t in tensors()], {})),
        ("dropout", "dropout", lambda: (tensors(), {"dropout": 0.1})),
        (
            "a mask of three dimensions",
            "shape",
            lambda: (tensors(2, 2), {"mask": torch.ones(2, 6, 6, dtype=torch.bool)}),
        ),
        ("a learned mask", "learned", lambda: (tensors(), {"mask": torch.zeros(6, 6, requires_grad=True)})),
        ("values of another width", "wide", lambda: (tensors(value_width=16), {})),
        ("a last dimension that is spread", "strides", lambda: ([t.transpose(-1, -2) for t in tensors(length=8)], {})),
        ("one key for all samples", "samples", lambda: ([tensors()[0], *(t[:1] for t in tensors()[1:])], {})),
        ("one head of keys without saying so", "heads", lambda: (tensors(key_heads=1), {})),
    ],
)
def test_what_keeps_flash_away_on_the_cpu_is_named_with_its_remedy(name, says, arguments):
    given, options = arguments()
    choice = agree(*given, **options)
    assert choice.kernel == "math"
    assert says in choice.why
    assert choice.change
    assert choice.score_bytes == given[0][..., 0].numel() * given[1].shape[-2] * 4
    assert not choice.fused


def test_the_remedies_bring_flash_back():
    q, k, v = tensors(2, 4, 6, 8)
    agree(q, k, v, dropout=0.1)
    assert agree(q, k, v).kernel == "flash"
    spread = [t.transpose(-1, -2) for t in tensors(length=8)]
    assert agree(*(t.contiguous() for t in spread)).kernel == "flash"
    mask = torch.ones(2, 6, 6, dtype=torch.bool)
    assert agree(q, k, v, mask=mask[:, None]).kernel == "flash"
    shared = tensors(key_heads=2)
    assert agree(*shared, gqa=True).kernel == "flash"
    learned = torch.zeros(6, 6, requires_grad=True)
    assert agree(q, k, v, mask=learned.detach()).kernel == "flash"
    assert agree(*tensors(value_width=16)).kernel == "math"
    padded = tensors(value_width=16)
    assert agree(*(torch.nn.functional.pad(t, (0, 16 - t.shape[-1])) for t in padded)).kernel == "flash"


def test_autocast_decides_by_the_type_it_casts_to():
    q, k, v = tensors()
    half = v.to(torch.bfloat16)
    with pytest.raises(ConfigError, match="one type"):
        perfagent.best_attention(q, k, half)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert agree(q, k, half).kernel == "flash"


@pytest.mark.parametrize(
    ("allowed", "dropout", "kernel"),
    [
        ([SDPBackend.MATH], 0.0, "math"),
        ([SDPBackend.FLASH_ATTENTION], 0.0, "flash"),
        ([SDPBackend.FLASH_ATTENTION], 0.1, "none"),
        ([SDPBackend.EFFICIENT_ATTENTION], 0.0, "none"),
    ],
)
@pytest.mark.filterwarnings("ignore:Flash attention kernel not used", "ignore:Both fused kernels do not support")
def test_switched_off_kernels_are_said_to_be_so(allowed, dropout, kernel):
    q, k, v = tensors()
    with sdpa_kernel(allowed):
        choice = agree(q, k, v, dropout=dropout)
    assert choice.kernel == kernel
    if kernel != "flash":
        assert "switched off" in choice.why


def test_reasons_and_torch_s_choice_never_contradict_each_other():
    """The rules alone would have chosen the same kernel, over 240 random calls."""
    generator = torch.Generator().manual_seed(5)

    def pick(*values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    kernels = set()
    for _ in range(240):
        heads = pick(1, 2, 4)
        q, k, v = tensors(
            pick(1, 2), heads, pick(1, 3, 8), pick(1, 7, 8), keys=pick(None, 5), key_heads=pick(None, None, 1, 2),
            value_width=pick(None, None, 8), dtype=pick(torch.float32, torch.bfloat16), grad=pick(False, True),
        )  # fmt: skip
        if pick(False, False, True):
            q = q.transpose(-1, -2).contiguous().transpose(-1, -2)
        causal, mask = pick(False, True), None
        if not causal and pick(False, True):
            mask = torch.ones(pick((1, 1), (q.shape[-2], k.shape[-2]), (1, 1, q.shape[-2], 1)), dtype=torch.bool)
        gqa, dropout = pick(False, True), pick(0.0, 0.0, 0.5)
        with contextlib.suppress(ConfigError):
            choice = perfagent.best_attention(q, k, v, causal=causal, mask=mask, dropout=dropout, gqa=gqa)
            assert (choice.kernel == "flash") == (not choice.obstacles), str(choice)
            ran = kernel_that_ran(q, k, v, is_causal=causal, attn_mask=mask, dropout_p=dropout, enable_gqa=gqa)
            # math then finds shapes that do not fit
            assert choice.kernel == ran or (ran == "none" and choice.kernel == "math")
            kernels.add(choice.kernel)
    assert kernels == {"flash", "math"}


# ---- what a mask says


def causal_mask(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def blocks(lengths, *, causal):
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    same = ids[:, None] == ids[None, :]
    return same & causal_mask(len(ids)) if causal else same


def padded(lengths, length, *, left=False):
    steps = torch.arange(length).expand(len(lengths), length)
    real = torch.tensor(lengths)[:, None]
    return (steps >= length - real) if left else (steps < real)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(
    ("mask", "advice"),
    [
        (torch.ones(8, 8, dtype=torch.bool), "leave the mask out"),
        (causal_mask(8), "is_causal=True instead"),
        (blocks([3, 5], causal=True), "packed_attention(q, k, v, lengths=[3, 5], causal=True)"),
        (blocks([1, 2, 1, 1, 3], causal=False), "lengths=[1, 2, 1, 1, ...], causal=False"),
        (padded([8, 5], 8)[:, None, None, :], "pack the samples"),
        (padded([8, 5], 8)[:, None, None, :] & causal_mask(8), "is_causal=True and leave the mask out"),
        (padded([8, 5], 8, left=True)[:, None, None, :] & causal_mask(8), "pack the samples"),
        (torch.eye(8, dtype=torch.bool) | torch.eye(8, dtype=torch.bool).roll(3, 0), ""),
    ],
)
def test_a_mask_that_says_what_a_flag_says_is_recognised(mask, advice, added):
    q, k, v = tensors(2, 4, 8, 8)
    given = torch.zeros(mask.shape).masked_fill(~mask, float("-inf")) if added else mask
    choice = agree(q, k, v, mask=given)
    assert choice.kernel == "flash"
    assert advice in choice.change
    assert bool(choice.change) == bool(advice)


def test_the_advice_on_masks_changes_no_result():
    q, k, v = tensors(2, 4, 8, 8, dtype=torch.float64)
    masked = scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(8))
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, is_causal=True), masked)
    both = padded([8, 5], 8)[:, None, None, :] & causal_mask(8)
    real = padded([8, 5], 8)[:, None, :, None]
    masked = scaled_dot_product_attention(q, k, v, attn_mask=both)
    plain = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close((plain * real), (masked * real))


def test_a_bias_is_no_mask():
    q, k, v = tensors(2, 4, 8, 8)
    slopes = -0.1 * (torch.arange(8)[:, None] - torch.arange(8)[None, :]).abs().float()
    assert agree(q, k, v, mask=slopes).change == ""
    learned = slopes.clone().requires_grad_(True)
    assert "flex_attention" in agree(q, k, v, mask=learned).change


def test_looking_draws_no_random_number_and_changes_nothing():
    q, k, v = tensors(2, 4, 8, 8, grad=True)
    mask = causal_mask(8)
    before, copies = torch.get_rng_state(), [t.detach().clone() for t in (q, k, v)]
    perfagent.best_attention(q, k, v, mask=mask, dropout=0.5)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(t, copy) and t.grad is None for t, copy in zip((q, k, v), copies, strict=True))


def test_weights_are_in_no_fused_kernel():
    choice = perfagent.best_attention(*tensors(), weights=True)
    assert choice.kernel == "explicit"
    assert "need_weights=False" in choice.change


# ---- another GPU, by the rules that torch documents in its source

A100, L4, H100, B200, V100 = ((8, 0), (8, 9), (9, 0), (10, 0), (7, 0))


def on(capability, *, dtype=torch.bfloat16, cudnn=0, version=(2, 13), **shape):
    arguments = {name: shape.pop(name) for name in ("causal", "mask", "dropout", "gqa") if name in shape}
    q, k, v = (t.to("meta") for t in tensors(dtype=dtype, **shape))
    return perfagent.best_attention(
        q, k, v, gpu=Gpu(capability=capability, cudnn=cudnn, torch_version=version), **arguments
    )


@pytest.mark.parametrize(
    ("kernel", "says", "given"),
    [
        ("flash", "first that torch tries", {"capability": A100}),
        ("efficient", "flash computes in float16 or bfloat16", {"capability": A100, "dtype": torch.float32}),
        (
            "efficient",
            "flash takes no mask",
            {"capability": A100, "mask": torch.ones(6, 6, dtype=torch.bool, device="meta")},
        ),
        ("efficient", "compute capability 8.0", {"capability": V100, "dtype": torch.float16}),
        ("math", "float16, float32, not in bfloat16", {"capability": V100}),
        ("efficient", "width of 256", {"capability": A100, "width": 264}),
        ("math", "multiple of 8", {"capability": A100, "width": 260}),
        ("flash", "first", {"capability": A100, "width": 7}),
        ("flash", "first", {"capability": A100, "width": 200, "grad": True}),
        ("efficient", "backward", {"capability": L4, "width": 200, "grad": True}),
        ("flash", "first", {"capability": L4, "width": 200}),
        ("flash", "first", {"capability": L4, "width": 240, "grad": True}),
        ("efficient", "backward", {"capability": L4, "width": 240, "grad": True, "dropout": 0.1}),
        ("efficient", "lower right", {"capability": A100, "causal": True, "keys": 5}),
        ("math", "double", {"capability": A100, "dtype": torch.float64}),
        ("flash", "first", {"capability": A100, "key_heads": 2, "gqa": True}),
        ("math", "enable_gqa", {"capability": A100, "key_heads": 2}),
        ("cudnn", "first", {"capability": H100, "cudnn": 91900}),
        ("flash", "first", {"capability": H100, "cudnn": 91400}),
        ("flash", "first", {"capability": A100, "cudnn": 91900}),
        (
            "cudnn",
            "first",
            {"capability": B200, "cudnn": 91900, "mask": torch.ones(6, 6, dtype=torch.bool, device="meta")},
        ),
        ("flash", "steps of 1/16", {"capability": H100, "cudnn": 91900, "dropout": 0.1}),
        # torch 2.11, as seen on an H200
        ("cudnn", "first", {"capability": H100, "cudnn": 91900, "version": (2, 11), "dropout": 0.1}),
        ("cudnn", "first", {"capability": H100, "cudnn": 91900, "version": (2, 11), "width": 200, "grad": True}),
        ("efficient", "width of 256", {"capability": H100, "cudnn": 91900, "version": (2, 11), "width": 264}),
        ("flash", "width of 128", {"capability": B200, "cudnn": 91900, "version": (2, 11), "width": 200}),
        ("cudnn", "first", {"capability": H100, "cudnn": 91900, "dropout": 0.125}),
        ("flash", "up to a width of 128", {"capability": H100, "cudnn": 91900, "width": 136}),
        ("efficient", "cudnn computes in", {"capability": H100, "cudnn": 91900, "dtype": torch.float32}),
    ],
)
def test_the_kernel_on_another_gpu_follows_the_conditions_in_torch_s_source(kernel, says, given):
    choice = on(**given)
    assert choice.kernel == kernel, str(choice)
    said = str(choice) + " ".join(o.why + o.change for found in choice.obstacles.values() for o in found)
    assert says in said or (says == "double" and "float64" in said)
    assert choice.predicted


def test_every_condition_of_every_kernel_can_fail():
    """What is a condition is met by some call and not by another: no rule is dead, none always says no."""
    good = AttentionCall(
        query=(2, 4, 8, 64), key=(2, 4, 8, 64), value=(2, 4, 8, 64), dtypes=(torch.bfloat16,) * 3, device="cuda"
    )
    for kernel in ("flash", "efficient", "cudnn"):
        assert obstacles(kernel, good, Gpu(capability=H100), Switches()) == []
        assert obstacles(kernel, good, Gpu(capability=(13, 0)), Switches())
        assert obstacles(kernel, good, Gpu(capability=H100), Switches(**{kernel: False}))
    assert obstacles("cudnn", good, Gpu(capability=H100, cudnn=8900), Switches())
    assert obstacles("cudnn", good, Gpu(capability=H100), Switches(deterministic=True))
    assert default_order("cuda", Gpu(capability=H100, cudnn=91502))[0] == "cudnn"
    assert default_order("cuda", Gpu(capability=(10, 2), cudnn=91502, cuda=(12, 9)))[0] == "flash"


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


# ---- misuse


@pytest.mark.parametrize(
    ("says", "given", "options"),
    [
        ("must be a tensor", ("q", None, None), {}),
        ("exclude each other", None, {"causal": True, "mask": torch.ones(6, 6)}),
        ("probability", None, {"dropout": 2.0}),
        ("must be a tensor", None, {"mask": [1]}),
        ("product does not exist", (torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4)), {}),
        ("each key needs its value", (torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3), torch.ones(1, 1, 5, 3)), {}),
        ("one device", (torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3, device="meta"), torch.ones(1, 1, 2, 3)), {}),
        ("numbers with a fraction", (torch.ones(1, 1, 2, 3).int(),) * 3, {}),
    ],
)
def test_what_torch_would_refuse_is_refused_with_a_sentence(says, given, options):
    with pytest.raises(ConfigError, match=says):
        perfagent.best_attention(*(given or tensors()), **options)
