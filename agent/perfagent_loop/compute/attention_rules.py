"""Which kernels of `scaled_dot_product_attention` can take a call, and if not, why and what to change.

These are the conditions of torch 2.11 to 2.13 (where they differ, by its version), one by one: on the CPU those of
aten/src/ATen/native/transformers/sdp_utils_cpp.{h,cpp}, on CUDA those of .../cuda/sdp_utils.cpp. torch itself names no
reason for a GPU that is not here, and none on the CPU. Where the tensors' device is at hand, `best_attention` asks
torch for its choice, and tests compare the two.

Not described: nested tensors, ROCm, and FlashAttention 3 or 4 put in place by `activate_flash_attention_impl`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

__all__ = ["AttentionCall", "Gpu", "Kernel", "Obstacle", "default_order", "obstacles"]

Kernel = Literal["flash", "efficient", "cudnn", "math", "explicit", "none"]
_LATER = "an A100, L4, H100 or later has it"
_WIDE_IN_CUDNN = (2, 11)
"""Up to this torch, cuDNN on Hopper takes heads up to 256 wide and any dropout (seen in 2.11 on an H200); later ones
ask for a newer cuDNN, and for dropout in steps of 1/16."""


def _version(text: str | None) -> tuple[int, int]:
    """ "13.0" -> (13, 0)"""
    major, minor = (text or "0.0").split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of scaled_dot_product_attention. q, k, v: (batch, heads, length, width). dtype: that autocast brings them
    to; None without autocast. device: cpu, cuda, ..., which may be another than theirs. The rest: as in torch's call."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    mask: Tensor | None
    dropout: float
    gqa: bool
    dtype: torch.dtype | None
    device: str

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [t.dtype if self.dtype is None or t.dtype == torch.float64 else self.dtype for t in self.tensors]

    @property
    def grad(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    @property
    def score_bytes(self) -> int:
        """What one matrix of scores takes that the math kernel makes: batch x heads x length x keys numbers."""
        return math.prod(self.q.shape[:-1]) * self.k.shape[-2] * self.dtypes[0].itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as the rules see it: compute capability, cuDNN's version as torch.backends.cudnn.version() gives it (91501
    is 9.15.1; 0 without cuDNN), versions of CUDA and torch."""

    capability: tuple[int, int]
    cudnn: int = 91900
    cuda: tuple[int, int] = (13, 0)
    name: str = ""
    torch_version: tuple[int, int] = _version(torch.__version__)

    @classmethod
    def here(cls, device: torch.device) -> Gpu:
        """The GPU of these tensors."""
        return cls(
            capability=torch.cuda.get_device_capability(device),
            cudnn=torch.backends.cudnn.version() or 0,  # type: ignore[no-untyped-call]
            cuda=_version(torch.version.cuda),
            name=torch.cuda.get_device_name(device),
        )

    @property
    def said(self) -> str:
        return self.name or f"a GPU of compute capability {self.capability[0]}.{self.capability[1]}"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a kernel cannot take a call, and what would let it."""

    why: str
    change: str


Rule: TypeAlias = tuple[bool, str, str]
"""Whether there is an obstacle, why, and what to change."""


def default_order(gpu: Gpu | None) -> list[Kernel]:
    """In which torch tries the kernels: cuDNN's first on Hopper and Blackwell with cuDNN above 9.15.0, else never
    before math. gpu: None on the CPU."""
    if gpu is None:
        return ["flash", "math"]
    major, minor = gpu.capability
    good = major in (9, 10) and (gpu.cuda >= (13, 0) or minor in (0, 3))
    return ["cudnn", "flash", "efficient", "math"] if gpu.cudnn > 91500 and good else ["flash", "efficient", "math"]


def obstacles(kernel: Kernel, call: AttentionCall, gpu: Gpu | None) -> tuple[Obstacle, ...]:
    """All that keeps this kernel from taking the call, the process's sdpa_kernel among it; nothing where it can."""
    cuda = torch.backends.cuda
    allowed = {
        "flash": cuda.flash_sdp_enabled, "efficient": cuda.mem_efficient_sdp_enabled, "math": cuda.math_sdp_enabled,
        "cudnn": cuda.cudnn_sdp_enabled,
    }  # fmt: skip
    rules: list[Rule]
    if not allowed[kernel]():  # type: ignore[no-untyped-call]
        rules = [(True, f"the {kernel} kernel is switched off", "leave the sdpa_kernel context, or add it to its list")]
    elif kernel == "math":
        rules = []
    elif call.device != "cpu" and gpu is None:
        rules = [(True, f"there are no fused kernels on {call.device} here", "use tensors on a GPU")]
    elif {tensor.dim() for tensor in call.tensors} != {4}:
        why = f"fused kernels take (batch, heads, length, width), and query has {call.q.dim()} dimensions"
        rules = [(True, why, "add the missing ones with unsqueeze before the call")]
    elif gpu is None:
        rules = _flash_on_cpu(call)
    else:
        rules = {"flash": _flash_on_cuda, "efficient": _efficient_on_cuda, "cudnn": _cudnn_on_cuda}[kernel](call, gpu)
    return tuple(Obstacle(why, change) for there, why, change in rules if there)


def _flash_on_cpu(call: AttentionCall) -> list[Rule]:
    dropout = (
        call.dropout > 0.0, f"dropout of attention weights ({call.dropout}) is not in the CPU's flash kernel",
        "set dropout_p to 0 and drop out after the attention, or train with dropout on a GPU",
    )  # fmt: skip
    types = _dtypes(call, (torch.float32, torch.float64, torch.bfloat16, torch.float16))
    return [dropout, _heads_and_batch(call), *_mask_shape(call), _same_width(call), *_strides(call), types]


def _flash_on_cuda(call: AttentionCall, gpu: Gpu) -> list[Rule]:
    width = max(tensor.shape[-1] for tensor in call.tensors)
    small_memory = (8, 6) <= gpu.capability <= (8, 9) or gpu.capability >= (12, 0)  # of a multiprocessor
    length, keys = call.q.shape[-2], call.k.shape[-2]
    return [
        _capability("flash", gpu),
        (
            call.mask is not None, "flash takes no mask",
            "say causal attention by is_causal=True instead of a mask, put documents of unequal length into packed_attention, "
            "and use torch.nn.attention.flex_attention for a bias or a window",
        ),
        _half(call, gpu, "flash"),
        _same_width(call),
        (width > 256, f"flash takes heads up to a width of 256, not {width}", "make more and narrower heads"),
        (
            call.grad and small_memory and width > 192 and (width <= 224 or call.dropout > 0.0),
            f"flash cannot go backward through heads of width {width} with dropout {call.dropout} on {gpu.said}",
            "make the heads at most 192 wide",
        ),
        (
            call.causal and length != keys,
            f"flash's causal mask begins at the lower right where lengths differ (query {length}, key {keys}), torch's at the "
            "upper left",
            "use torch.nn.attention.bias.causal_lower_right or causal_upper_left as attn_mask: they say which, and keep flash",
        ),
        _heads_and_batch(call), *_strides(call, singleton=True),
    ]  # fmt: skip


def _efficient_on_cuda(call: AttentionCall, gpu: Gpu) -> list[Rule]:
    modern = gpu.capability >= (8, 0)
    half = call.dtypes[0] in (torch.float16, torch.bfloat16)
    tensor_cores = modern or (gpu.capability >= (7, 0) and half)
    multiple = max(4 if modern else 1, (8 if half else 4) if tensor_cores else 1)  # of elements, for the matrix units
    width, of_values = call.q.shape[-1], call.v.shape[-1]
    return [
        _capability("the efficient kernel", gpu, (5, 0), "use a torch built for it"),
        _dtypes(call, (torch.float16, torch.float32, torch.bfloat16)[: 3 if modern else 2]),
        (
            bool(width % multiple or of_values % multiple),
            f"the efficient kernel needs heads whose width is a multiple of {multiple} here, not {width}",
            f"pad the heads to a multiple of {multiple}, or choose their number so that it comes out",
        ),
        (
            modern and any(int(tensor.storage_offset()) % multiple for tensor in call.tensors),
            f"query, key or value begins within its storage at no multiple of {multiple} elements",
            "make it .contiguous() after slicing",
        ),
        _heads_and_batch(call), *_strides(call),
    ]  # fmt: skip


def _cudnn_on_cuda(call: AttentionCall, gpu: Gpu) -> list[Rule]:
    if gpu.cudnn < 90000:
        return [(True, f"cuDNN attention needs cuDNN 9 or later, not {gpu.cudnn}", "use a torch built with cuDNN 9")]
    query, value = call.q.shape[-1], call.v.shape[-1]
    wide, widest = max(query, value), _widest_in_cudnn(gpu, query, value)
    was_wide = gpu.torch_version <= _WIDE_IN_CUDNN
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    backward = widest == 256 and 128 < wide <= 256 and (query, value) not in ((192, 128), (256, 256))
    return [
        _capability("cuDNN attention", gpu),
        (
            strict, "cuDNN attention is not deterministic, and torch.use_deterministic_algorithms is on",
            "flash has a deterministic backward",
        ),
        _half(call, gpu, "cudnn"), *_mask_shape(call),
        (
            call.dropout > 0.0 and 91100 < gpu.cudnn < 91400, "cuDNN 9.11 to 9.13 has no dropout in attention",
            "use cuDNN 9.14 or later",
        ),
        (
            bool(call.dropout * 16.0 % 1.0) and not was_wide,
            f"cuDNN drops out in steps of 1/16, and dropout is {call.dropout}", "use 0.0625, 0.125 or another multiple",
        ),
        *_strides(call, singleton=True), _heads_and_batch(call, one_of_values=True),
        (wide > widest, f"cuDNN attention takes heads up to a width of {widest} here, not {wide}", "make them narrower"),
        (
            call.grad and backward and not (was_wide and gpu.capability == (9, 0)),
            f"cuDNN cannot go backward through heads of width {query} and {value}", "make them at most 128 wide, or 256 both",
        ),
        (
            bool(query % 8 or value % 8),
            f"cuDNN attention needs heads whose width is a multiple of 8, not {query} and {value}", "pad them",
        ),
        (
            call.k.shape[-2] == 1, "cuDNN attention takes no sequence of a single key",
            "nothing needs to be done: it is quick by any kernel",
        ),
        (
            call.dropout > 0.0 and call.q.shape[-2] == 1, "cuDNN attention takes no single query with dropout",
            "set dropout_p to 0 when generating",
        ),
        (max(call.q.shape[:2]) > 65535, "cuDNN attention takes at most 65535 samples and heads", "make the batch smaller"),
    ]  # fmt: skip


def _widest_in_cudnn(gpu: Gpu, query: int, value: int) -> int:
    hopper = gpu.capability == (9, 0)
    if (hopper and gpu.torch_version <= _WIDE_IN_CUDNN) or ((hopper or gpu.capability[0] == 10) and gpu.cudnn > 92200):
        return 256
    both = (hopper or gpu.capability[0] == 10) and gpu.cudnn >= 91100 and (query, value) == (192, 128)
    return 192 if both else 128


def _capability(kernel: str, gpu: Gpu, least: tuple[int, int] = (8, 0), change: str = _LATER) -> Rule:
    why = f"{kernel} needs compute capability {least[0]}.{least[1]} to 12.1, and this is {gpu.said}"
    return not least <= gpu.capability <= (12, 1), why, change


def _half(call: AttentionCall, gpu: Gpu, kernel: str) -> Rule:
    allowed = (torch.float16, torch.bfloat16)[: 2 if gpu.capability >= (8, 0) else 1]
    names, found = " or ".join(map(_name, allowed)), _name(call.dtypes[0])
    change = "run the forward pass in torch.autocast('cuda', dtype=torch.bfloat16), as loop(precision='bf16') does"
    return call.dtypes[0] not in allowed, f"{kernel} computes in {names}, and query, key and value are {found}", change


def _dtypes(call: AttentionCall, allowed: tuple[torch.dtype, ...]) -> Rule:
    why = f"it computes in {', '.join(map(_name, allowed))}, not in {_name(call.dtypes[0])}"
    return call.dtypes[0] not in allowed, why, "use one of these types"


def _heads_and_batch(call: AttentionCall, *, one_of_values: bool = False) -> Rule:
    """one_of_values: keys and values may differ in number of heads (cuDNN)."""
    samples = [tensor.shape[0] for tensor in call.tensors]
    if len({*samples}) > 1:
        why = f"query, key and value are {samples[0]}, {samples[1]} and {samples[2]} samples"
        return True, why, "bring them to one batch size with expand() before the call"
    heads, keys, values = (tensor.shape[1] for tensor in call.tensors)
    if call.gqa:
        uneven = (keys != values and not one_of_values) or not keys or not values or heads % keys or heads % values
        why = f"{heads} heads of queries cannot share {keys} of keys and {values} of values"
        return bool(uneven), why, "the number of heads of keys and values must be the same and divide that of queries"
    why = f"query has {heads} heads, key {keys}, value {values}"
    change = "say enable_gqa=True where heads of queries share keys, or expand keys and values"
    return not heads == keys == values, why, change


def _mask_shape(call: AttentionCall) -> list[Rule]:
    mask = call.mask
    if mask is None:
        return []
    if mask.requires_grad:
        change = "on a GPU, add the bias in torch.nn.attention.flex_attention; a constant mask needs .detach()"
        return [(True, "the mask is learned (it requires a gradient), which only the math kernel gives", change)]
    wanted = (*call.q.shape[:3], call.k.shape[-2])
    sizes = zip(mask.shape, wanted[-mask.dim() :], strict=True) if mask.dim() in (2, 4) else [(0, 1)]
    fits = all(given in (1, size) for given, size in sizes)
    why = (
        f"the mask has the shape {tuple(mask.shape)}; fused kernels take (length, keys) or (batch or 1, heads or 1, length, "
        f"keys), here {wanted[2:]} or {wanted}"
    )
    return [(not fits, why, "bring it to four dimensions, as mask[:, None] does for one of (batch, length, keys)")]


def _same_width(call: AttentionCall) -> Rule:
    query, key, value = (tensor.shape[-1] for tensor in call.tensors)
    why = f"the heads of query, key and value are {query}, {key} and {value} wide"
    return not query == key == value, why, "pad values with zeros to the width of the queries and cut the result"


def _strides(call: AttentionCall, *, singleton: bool = False) -> list[Rule]:
    """singleton: heads of width 1 may have any stride."""
    strides = tuple(tensor.stride(-1) for tensor in call.tensors)
    apart = strides != (1, 1, 1) and not (singleton and call.q.shape[-1] == 1)
    of_mask = call.device != "cpu" and call.mask is not None and call.mask.dim() > 0 and call.mask.stride(-1) != 1
    why = f"the last dimension of query, key and value must lie together in memory; its strides are {strides}"
    return [
        (apart, why, "transpose so that the width stays last, or call .contiguous()"),
        (
            of_mask and not apart,
            "the mask's last dimension must lie together in memory",
            "call .contiguous() on the mask",
        ),
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
