"""What an agent finds out about a NaN, memory that ran out, slow steps and hangs: names and figures, of which the server makes
sentences. What is not known is absent. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

from typing import TypedDict

__all__ = [
    "ITSELF", "BadModule", "BadTensor", "BadTensors", "Batch", "BatchTensor", "Began", "Gap", "Gaps", "MemoryEvidence",
    "MinusInfinity", "NonfiniteEvidence", "OperatorFound", "OperatorTimes", "ProfileEvidence", "Reason", "ThreadStack",
]  # fmt: skip

ITSELF = "(the model itself)"
"""In the place of the name of a module, which the model has none of."""

Reason = dict[str, str | int | float | list[str]]
"""Why a command is refused, a profile is cut short or without its trace, or a process ended. key: of the server's sentence;
beside it the figures of that."""


class BadTensor(TypedDict, total=False):
    """A tensor with `nonfinite` values that are NaN or infinite, which are `share` of all."""

    name: str
    nonfinite: int
    share: float
    dtype: str
    shape: list[int]


class BadTensors(TypedDict, total=False):
    """Which of some named tensors hold NaN or infinity, in the order of the model. step: when. spread: all that are trained,
    and more than one. good_from: the first good one, where all before it are bad and all from it on are good."""

    step: int
    of: int
    nonfinite: int
    first: list[BadTensor]
    last: str | None
    spread: bool
    good_from: str


MinusInfinity = TypedDict("MinusInfinity", {"read_as": list[str], "from": str}, total=False)
"""As what an operator read -inf; from: the operator that had made it, absent where it came from outside."""


class OperatorFound(TypedDict, total=False):
    """The operator that made the first bad value, from finite inputs; absent where it came from outside, as a batch or a buffer.

    inputs_unseen: of finite ones it makes nothing bad, or hardly ever, and what it was given cannot be seen. read_by: the
    first operator that read the value, and as what; buffer: the one that it read there. minus_infinity: the operator
    itself read -inf. made: "nan" or "-inf", where it is certain. of: a parameter that the operator uses; after: the last
    one used before it; before: the first one used after it.
    """

    operator: str
    inputs_unseen: bool
    read_by: str
    read_as: list[str]
    buffer: str
    minus_infinity: MinusInfinity
    made: str
    is_the_only_one: bool
    after: str
    before: str
    of: str


BadModule = TypedDict(
    "BadModule",
    {
        "module": str, "class": str, "step": int, "nonfinite": int, "share": float, "inputs_finite": bool, "shape": list[int],
        "dtype": str,
    },
    total=False,
)  # fmt: skip
"""A module whose output held NaN or infinity."""


class BatchTensor(TypedDict, total=False):
    """min, max: of the finite values. minus_infinite: how many of the nonfinite values are -inf."""

    name: str
    shape: list[int]
    dtype: str
    device: str
    min: float
    max: float
    nonfinite: int
    minus_infinite: int
    hash: str


Batch = TypedDict("Batch", {"step": int, "from": Reason | str, "hash": str, "tensors": list[BatchTensor]}, total=False)
"""from: where it was found: called_with (by the model), or local_variables of a `function` at a `line`."""


class Began(TypedDict, total=False):
    """The steps between which it began. causes/onset.py says what each field is."""

    first: int
    last: int
    by: str
    measured: bool


class NonfiniteEvidence(TypedDict, total=False):
    """Where a NaN came from.

    cause: ignored_labels, batch, zero_eps, left_out, buffer, operator, forward, parameter, module, backward, gradient,
    spread or unknown. What the cause is about follows it, from `module` to `eps_dtype`: finite is the bias whose gradient
    was good; after_module and before_module lie around the operator. parameters_before: as they were when the loss was made;
    parameters_after: after step looked_after_step; gradients: left by it; optimizer_state: averages that it keeps of them;
    gradients_began: of the step in which it began. steps_checked_after: steps whose modules were checked; steps_after: that
    were over when the run ended. loaded: no step of this run made it. shared: the further names of weights that the cause
    names.
    """

    step: int
    rank: int
    world_size: int
    lr: float
    loss_scale: float
    loss: float
    grad_norm: float
    history: list[dict[str, float]]
    loss_dtype: str
    parameters_before: BadTensors
    parameters_after: BadTensors
    gradients: BadTensors
    gradients_began: BadTensors
    optimizer_state: BadTensors
    looked_after_step: int
    operator: OperatorFound
    first_module: BadModule
    batch: Batch
    later_batch: Batch
    steps_checked_after: int
    steps_after: int
    began: Began
    loaded: bool
    shared: dict[str, list[str]]
    cause: str
    module: str
    module_class: str
    parameter: str
    good_from: str
    finite: str
    buffer: str
    batch_tensor: str
    batch_step: int
    after_module: str
    before_module: str
    eps: float
    eps_dtype: str


class MemoryEvidence(TypedDict, total=False):
    """What filled the memory when an allocation failed. where: the phase of the step; number: of the failed allocations of
    this run; worker: the pid of the DataLoader's worker that asked; categories: what is held, by what it is for; dtypes: of
    the parameters."""

    step: int
    rank: int
    world_size: int
    device: str
    error: str
    where: str
    number: int
    tried_bytes: int
    worker: int
    allocator: dict[str, int]
    capacity_bytes: int | None
    largest_segments: list[dict[str, int]]
    host: dict[str, int]
    categories: dict[str, int]
    dtypes: list[str]
    last_steps: list[dict[str, float]]


class OperatorTimes(TypedDict, total=False):
    name: str
    calls: int
    self_cpu_s: float
    total_cpu_s: float
    self_device_s: float
    total_device_s: float


class Gap(TypedDict):
    """after, before: what ran there, "" at the beginning and at the end of the steps."""

    s: float
    after: str
    before: str
    at_s: float


class Gaps(TypedDict, total=False):
    """When nothing ran. of: on the "device", or between "operators" where none was used."""

    of: str
    busy_s: float
    idle_s: float
    idle_pct: float
    longest: list[Gap]


class ProfileEvidence(TypedDict, total=False):
    """Result of a profile. steps: the first and the last one. shares: causes/trace.py says of what. operators: those
    with the most time."""

    profile: str
    rank: int
    steps: list[int]
    shares: dict[str, float]
    gaps: Gaps
    operators: list[OperatorTimes]
    url: str


class ThreadStack(TypedDict, total=False):
    """Stack and state of a thread. state, waits_in: in the kernel's words; frames: the innermost last."""

    name: str
    thread: int
    main: bool
    training: bool
    daemon: bool
    state: str
    waits_in: str
    frames: list[str]
