"""Which kernels of `scaled_dot_product_attention` can take a call, and if not, why and what to change.

These are the conditions of torch 2.11 to 2.13 (where they differ, by its version), one by one, as pure functions of a
description of the call: on the CPU those of aten/src/ATen/native/transformers/sdp_utils_cpp.{h,cpp}, on CUDA those of
.../cuda/sdp_utils.cpp. They explain; where the tensors' device is at hand, `best_attention` asks torch itself for its
choice, and the tests hold the two against each other.

Not described: nested tensors, ROCm, and FlashAttention 3 or 4 put in place by `activate_flash_attention_impl`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

__all__ = ["AttentionCall", "Gpu", "Kernel", "Obstacle", "Switches", "default_order", "obstacles"]

_WIDE_IN_CUDNN = (2, 11)
"""Up to this torch, cuDNN on Hopper takes heads up to 256 wide and any dropout (seen in 2.11 on an H200); later ones ask
for a newer cuDNN, and for dropout in steps of 1/16."""


def _version(said: str) -> tuple[int, int]:
    """ "13.0" -> (13, 0)"""
    major, minor = said.split(".")[:2]
    return int(major), int(minor)


Kernel = Literal["flash", "efficient", "cudnn", "math", "explicit", "none"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of scaled_dot_product_attention, as far as the choice of a kernel depends on it.

    query, key, value: shapes, (batch, heads, length, width). last_strides: of their last dimensions. offsets: where
    they begin in their storage, in elements. mask: its shape; mask_stride: of its last dimension; mask_grad: it is
    learned. grad: gradients are wanted of query, key or value.
    """

    query: Shape
    key: Shape
    value: Shape
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    device: str = "cpu"
    causal: bool = False
    dropout: float = 0.0
    gqa: bool = False
    grad: bool = False
    mask: Shape | None = None
    mask_stride: int = 1
    mask_grad: bool = False
    last_strides: tuple[int, int, int] = (1, 1, 1)
    offsets: tuple[int, int, int] = (0, 0, 0)

    @property
    def dtype(self) -> torch.dtype:
        return self.dtypes[0]

    @property
    def score_bytes(self) -> int:
        """What one matrix of scores takes that the math kernel makes: batch x heads x length x keys numbers."""
        *leading, length, _ = self.query
        total = length * self.key[-2] * self.dtype.itemsize
        for size in leading:
            total *= size
        return total


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
        cudnn: Any = torch.backends.cudnn
        return cls(
            capability=torch.cuda.get_device_capability(device),
            cudnn=cudnn.version() or 0,
            cuda=_version(torch.version.cuda or "0.0"),
            name=torch.cuda.get_device_name(device),
        )

    @property
    def said(self) -> str:
        return self.name or f"a GPU of compute capability {self.capability[0]}.{self.capability[1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """Which kernels the process allows (torch.nn.attention.sdpa_kernel, torch.backends.cuda.enable_*_sdp), and
    determinism."""

    flash: bool = True
    efficient: bool = True
    math: bool = True
    cudnn: bool = True
    deterministic: bool = False

    @classmethod
    def now(cls) -> Switches:
        cuda: Any = torch.backends.cuda
        return cls(
            flash=cuda.flash_sdp_enabled(),
            efficient=cuda.mem_efficient_sdp_enabled(),
            math=cuda.math_sdp_enabled(),
            cudnn=cuda.cudnn_sdp_enabled(),
            deterministic=torch.are_deterministic_algorithms_enabled()
            and not torch.is_deterministic_algorithms_warn_only_enabled(),
        )


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a kernel cannot take a call, and what would let it."""

    why: str
    change: str


def default_order(device: str, gpu: Gpu | None) -> list[Kernel]:
    """In which torch tries the kernels: cuDNN's first on Hopper and Blackwell with cuDNN above 9.15.0, else never
    before math."""
    if device == "cpu" or gpu is None:
        return ["flash", "math"]
    major, minor = gpu.capability
    good = major in (9, 10) and (gpu.cuda >= (13, 0) or minor in (0, 3))
    return ["cudnn", "flash", "efficient", "math"] if gpu.cudnn > 91500 and good else ["flash", "efficient", "math"]


def obstacles(kernel: Kernel, call: AttentionCall, gpu: Gpu | None, switches: Switches) -> list[Obstacle]:
    """All that keeps this kernel from taking the call; nothing where it can."""
    if kernel == "math":
        return (
            []
            if switches.math
            else [Obstacle("the math kernel is switched off", "leave MATH in the list given to sdpa_kernel")]
        )
    if not getattr(switches, kernel):
        return [
            Obstacle(f"the {kernel} kernel is switched off", "leave the sdpa_kernel context, or add it to its list")
        ]
    if call.device == "cpu":
        return [*_flash_on_cpu(call)]
    if gpu is None:
        return [Obstacle(f"there are no fused kernels on {call.device} here", "use tensors on a GPU")]
    if len(call.query) != 4 or len(call.key) != 4 or len(call.value) != 4:
        return [*_four_dimensions(call)]
    rules = {"flash": _flash_on_cuda, "efficient": _efficient_on_cuda, "cudnn": _cudnn_on_cuda}
    return [*rules[kernel](call, gpu, switches)]


# ---- on the CPU


def _flash_on_cpu(call: AttentionCall) -> Iterator[Obstacle]:
    if len(call.query) != 4 or len(call.key) != 4 or len(call.value) != 4:
        yield from _four_dimensions(call)
        return
    if call.dropout > 0.0:
        yield Obstacle(
            f"dropout of attention weights ({call.dropout}) is not in the CPU's flash kernel",
            "set dropout_p to 0 and drop out after the attention, or train with dropout on a GPU",
        )
    yield from _heads_and_batch(call)
    yield from _mask_shape(call)
    yield from _same_width(call)
    yield from _no_empty_sequence(call)
    yield from _last_stride(call, singleton=False)
    yield from _dtypes(call, (torch.float32, torch.float64, torch.bfloat16, torch.float16))


# ---- on CUDA


def _flash_on_cuda(call: AttentionCall, gpu: Gpu, switches: Switches) -> Iterator[Obstacle]:  # noqa: ARG001 - one form for all
    if not (8, 0) <= gpu.capability <= (12, 1):
        yield Obstacle(
            f"flash needs compute capability 8.0 to 12.1, and this is {gpu.said}", "an A100, L4, H100 or later has it"
        )
    if call.mask is not None:
        yield Obstacle(
            "flash takes no mask",
            "say causal attention by is_causal=True instead of a mask, put documents of unequal length into packed_attention, "
            "and use torch.nn.attention.flex_attention for a bias or a window",
        )
    yield from _half(call, gpu, "flash")
    width = max(call.query[-1], call.key[-1], call.value[-1])
    yield from _same_width(call)
    if width > 256:
        yield Obstacle(f"flash takes heads up to a width of 256, not {width}", "make more and narrower heads")
    small_memory = (8, 6) <= gpu.capability <= (8, 9) or gpu.capability >= (12, 0)  # of a multiprocessor
    if call.grad and small_memory and width > 192 and (width <= 224 or call.dropout > 0.0):
        yield Obstacle(
            f"flash cannot go backward through heads of width {width} with dropout {call.dropout} on {gpu.said}",
            "make the heads at most 192 wide",
        )
    if call.causal and call.query[-2] != call.key[-2]:
        yield Obstacle(
            f"flash's causal mask begins at the lower right where lengths differ (query {call.query[-2]}, key {call.key[-2]}), "
            "torch's at the upper left",
            "use torch.nn.attention.bias.causal_lower_right or causal_upper_left as attn_mask: they say which, and keep flash",
        )
    yield from _heads_and_batch(call)
    yield from _no_empty_sequence(call)
    yield from _last_stride(call, singleton=True)


def _efficient_on_cuda(call: AttentionCall, gpu: Gpu, switches: Switches) -> Iterator[Obstacle]:  # noqa: ARG001 - one form for all
    if not (5, 0) <= gpu.capability <= (12, 1):
        yield Obstacle(
            f"the efficient kernel needs compute capability 5.0 to 12.1, and this is {gpu.said}",
            "use a torch built for it",
        )
    modern = gpu.capability >= (8, 0)
    allowed = (torch.float16, torch.float32, torch.bfloat16) if modern else (torch.float16, torch.float32)
    yield from _dtypes(call, allowed)
    multiple = _alignment(call, gpu)
    if call.query[-1] != call.key[-1]:
        yield from _same_width(call)
    if call.query[-1] % multiple or call.value[-1] % multiple or 0 in (call.query[-1], call.value[-1]):
        yield Obstacle(
            f"the efficient kernel needs heads whose width is a multiple of {multiple} here, not {call.query[-1]}",
            f"pad the heads to a multiple of {multiple}, or choose their number so that it comes out",
        )
    if modern and any(offset % multiple for offset in call.offsets):
        yield Obstacle(
            f"query, key or value begins within its storage at no multiple of {multiple} elements",
            "make it .contiguous() after slicing",
        )
    yield from _heads_and_batch(call)
    yield from _no_empty_sequence(call)
    yield from _last_stride(call, singleton=False)


def _cudnn_on_cuda(call: AttentionCall, gpu: Gpu, switches: Switches) -> Iterator[Obstacle]:
    if gpu.cudnn < 90000:
        yield Obstacle(f"cuDNN attention needs cuDNN 9 or later, not {gpu.cudnn}", "use a torch built with cuDNN 9")
        return
    if not (8, 0) <= gpu.capability <= (12, 1):
        yield Obstacle(
            f"cuDNN attention needs compute capability 8.0 to 12.1, and this is {gpu.said}", "flash has the same bounds"
        )
    if switches.deterministic:
        yield Obstacle(
            "cuDNN attention is not deterministic, and torch.use_deterministic_algorithms is on",
            "flash has a deterministic backward",
        )
    yield from _half(call, gpu, "cudnn")
    yield from _mask_shape(call)
    if call.dropout > 0.0 and 91100 < gpu.cudnn < 91400:
        yield Obstacle("cuDNN 9.11 to 9.13 has no dropout in attention", "use cuDNN 9.14 or later")
    if (call.dropout * 16.0) % 1.0 and gpu.torch_version > _WIDE_IN_CUDNN:
        yield Obstacle(
            f"cuDNN drops out in steps of 1/16, and dropout is {call.dropout}", "use 0.0625, 0.125 or another multiple"
        )
    yield from _no_empty_sequence(call)
    yield from _last_stride(call, singleton=True)
    yield from _heads_and_batch(call, one_of_values=True)
    yield from _cudnn_widths(call, gpu)


def _cudnn_widths(call: AttentionCall, gpu: Gpu) -> Iterator[Obstacle]:
    query, value, keys = call.query[-1], call.value[-1], call.key[-2]
    was_wide = gpu.torch_version <= _WIDE_IN_CUDNN and gpu.capability == (9, 0)
    hopper = gpu.capability == (9, 0) or gpu.capability[0] == 10
    widest = (
        256
        if was_wide or (hopper and gpu.cudnn > 92200)
        else 192
        if hopper and gpu.cudnn >= 91100 and (query, value) == (192, 128)
        else 128
    )
    if max(query, value) > widest:
        yield Obstacle(
            f"cuDNN attention takes heads up to a width of {widest} here, not {max(query, value)}", "make them narrower"
        )
    elif (
        call.grad
        and not was_wide
        and widest == 256
        and max(query, value) > 128
        and (query, value) not in ((192, 128), (256, 256))
    ):
        yield Obstacle(
            f"cuDNN cannot go backward through heads of width {query} and {value}",
            "make them at most 128 wide, or 256 both",
        )
    if query % 8 or value % 8:
        yield Obstacle(
            f"cuDNN attention needs heads whose width is a multiple of 8, not {query} and {value}", "pad them"
        )
    if keys == 1:
        yield Obstacle(
            "cuDNN attention takes no sequence of a single key", "nothing needs to be done: it is quick by any kernel"
        )
    if call.dropout > 0.0 and call.query[-2] == 1:
        yield Obstacle("cuDNN attention takes no single query with dropout", "set dropout_p to 0 when generating")
    if max(call.query[0], call.query[1]) > 65535:
        yield Obstacle("cuDNN attention takes at most 65535 samples and heads", "make the batch smaller")


# ---- shared conditions


def _four_dimensions(call: AttentionCall) -> Iterator[Obstacle]:
    yield Obstacle(
        f"fused kernels take (batch, heads, length, width), and query has {len(call.query)} dimensions",
        "add the missing ones with unsqueeze before the call",
    )


def _half(call: AttentionCall, gpu: Gpu, kernel: str) -> Iterator[Obstacle]:
    allowed = (torch.float16, torch.bfloat16) if gpu.capability >= (8, 0) else (torch.float16,)
    if call.dtypes[0] not in allowed and len({*call.dtypes}) == 1:
        names = " or ".join(_name(dtype) for dtype in allowed)
        yield Obstacle(
            f"{kernel} computes in {names}, and query, key and value are {_name(call.dtype)}",
            "run the forward pass in torch.autocast('cuda', dtype=torch.bfloat16), as perfagent.loop(precision='bf16') does",
        )
    else:
        yield from _dtypes(call, allowed)


def _dtypes(call: AttentionCall, allowed: tuple[torch.dtype, ...]) -> Iterator[Obstacle]:
    if len({*call.dtypes}) > 1:
        yield Obstacle(
            f"query, key and value differ in type ({', '.join(_name(dtype) for dtype in call.dtypes)})",
            "bring them to one type",
        )
    elif call.dtype not in allowed:
        yield Obstacle(
            f"it computes in {', '.join(_name(dtype) for dtype in allowed)}, not in {_name(call.dtype)}",
            "use one of these types",
        )


def _heads_and_batch(call: AttentionCall, *, one_of_values: bool = False) -> Iterator[Obstacle]:
    """one_of_values: keys and values may differ in number of heads (cuDNN)."""
    if not call.query[0] == call.key[0] == call.value[0]:
        yield Obstacle(
            f"query, key and value are {call.query[0]}, {call.key[0]} and {call.value[0]} samples",
            "bring them to one batch size with expand() before the call",
        )
        return
    heads, keys, values = call.query[1], call.key[1], call.value[1]
    if call.gqa:
        if (keys != values and not one_of_values) or not keys or not values or heads % keys or heads % values:
            yield Obstacle(
                f"{heads} heads of queries cannot share {keys} of keys and {values} of values",
                "the number of heads of keys and values must be the same and divide that of queries",
            )
    elif not heads == keys == values:
        yield Obstacle(
            f"query has {heads} heads, key {keys}, value {values}",
            "say enable_gqa=True where heads of queries share keys, or expand keys and values",
        )


def _mask_shape(call: AttentionCall) -> Iterator[Obstacle]:
    if call.mask is None:
        return
    if call.mask_grad:
        yield Obstacle(
            "the mask is learned (it requires a gradient), which only the math kernel gives",
            "on a GPU, add the bias in torch.nn.attention.flex_attention; a mask that is not learned needs .detach()",
        )
        return
    batch, heads, length, _ = call.query
    wanted = (batch, heads, length, call.key[-2])
    if len(call.mask) not in (2, 4) or any(
        given not in (1, size) for given, size in zip(call.mask, wanted[-len(call.mask) :], strict=True)
    ):
        yield Obstacle(
            f"the mask has the shape {call.mask}; fused kernels take (length, keys) or (batch or 1, heads or 1, length, keys), "
            f"here {wanted[2:]} or {wanted}",
            "bring it to four dimensions, as mask[:, None] does for one of (batch, length, keys)",
        )


def _same_width(call: AttentionCall) -> Iterator[Obstacle]:
    widths = (call.query[-1], call.key[-1], call.value[-1])
    if len({*widths}) > 1:
        yield Obstacle(
            f"the heads of query, key and value are {widths[0]}, {widths[1]} and {widths[2]} wide",
            "pad values with zeros to the width of the queries and cut the result",
        )


def _no_empty_sequence(call: AttentionCall) -> Iterator[Obstacle]:
    if not call.query[-2] or not call.key[-2]:
        yield Obstacle("a sequence is empty", "leave out batches without tokens")


def _last_stride(call: AttentionCall, *, singleton: bool) -> Iterator[Obstacle]:
    """singleton: heads of width 1 may have any stride."""
    if any(stride != 1 for stride in call.last_strides) and not (singleton and call.query[-1] == 1):
        yield Obstacle(
            f"the last dimension of query, key and value must lie together in memory; its strides are {call.last_strides}",
            "transpose so that the width stays last, or call .contiguous()",
        )
    elif call.device != "cpu" and call.mask is not None and call.mask_stride != 1:
        yield Obstacle("the mask's last dimension must lie together in memory", "call .contiguous() on the mask")


def _alignment(call: AttentionCall, gpu: Gpu) -> int:
    """Of how many elements rows must be multiples for the matrix units that this kernel uses."""
    half = call.dtype in (torch.float16, torch.bfloat16)
    tensor_cores = gpu.capability >= (8, 0) or (gpu.capability >= (7, 0) and half)
    least = 4 if gpu.capability >= (8, 0) else 1
    return max(least, 128 // (16 if half else 32)) if tensor_cores else least


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
