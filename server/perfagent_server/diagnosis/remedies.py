"""The remedy for each finding, in words. One entry a rule; figures belong into the message, not here."""

from __future__ import annotations

__all__ = [
    "ELSEWHERE_REMEDY",
    "GREW_REMEDY",
    "PEER_REMEDY",
    "REMEDIES",
    "STANDING_REMEDY",
    "crash_remedy",
    "oom_remedy",
]

REMEDIES: dict[str, str] = {
    "nonfinite_loss": (
        "Every later step works with damaged weights: stop the run if it still trains, go back to the last checkpoint before "
        "this step and skip the batch; if it comes back, lower the learning rate, clip the gradient norm (1.0 is usual), use "
        "bf16 instead of fp16, and look for log(0), division by zero or a bad sample in that batch."
    ),
    "nonfinite_gradient": (
        "Do not step on these gradients: clip_grad_norm_(..., error_if_nonfinite=True) or GradScaler skips such a step. If it "
        "repeats, lower the learning rate, use bf16 instead of fp16, and look at the layer and the batch named in the evidence."
    ),
    "loss_spike": (
        "Often it heals by itself. If the loss is not back within 200 steps, go back about 100 steps and skip the next 200 to "
        "500 batches. If spikes come again, lower the learning rate, clip the gradient norm at 1.0, and look at the data there."
    ),
    "data_bound": (
        "Give the DataLoader more workers (num_workers=4 or more; with 0, its default, it loads in the training process), "
        "persistent_workers=True and a higher prefetch_factor, and on a GPU pin_memory=True; cache what is decoded or tokenized "
        "again in every epoch, and move slow transforms out of the loop."
    ),
    "low_gpu_utilization": (
        "The GPU waits: remove the largest phase named in the evidence first. If none stands out, raise the batch size, compile "
        "the model (torch.compile) or capture CUDA graphs, and remove calls that wait for the device, such as .item()."
    ),
    "oom_observed": (
        "Halve the batch size and double gradient accumulation; then try mixed precision, activation checkpointing, and sharding "
        "(FSDP or ZeRO), in this order. If much memory is reserved but not allocated, set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    ),
    "process_crash": "Look at what the script printed last, fix the cause, and start the run again from its last checkpoint.",
    "lost_contact": (
        "Look whether the process and its host are alive (a bare attach cannot tell a kill from a cut network; "
        "`perfagent run` can), then at the network between them and this server."
    ),
}

ELSEWHERE_REMEDY = (
    'Put `with run.phase("NAME"):` around parts of the loop (run = perfagent.attach()), and each is timed beside the others. '
    "While it trains, `perfagent profile RUN` shows the operators of some steps, and `perfagent stacks RUN` what it does now."
)
"""For a run that no rule finds anything in, and most of whose step no phase accounts for."""

GREW_REMEDY = (
    "The loss ran away before it was no number: most often the steps are too large. Stop the run, go back to the last checkpoint "
    "from before it grew, and lower the learning rate (to a tenth, if it was just raised or never tried), warm it up, and clip "
    "the gradient norm (1.0 is usual); look for inputs that are not normalized if that does not help."
)
"""For a loss that is not finite and was a thousand times larger than usual just before."""

STANDING_REMEDY = (
    "If it neither evaluates nor saves now: `perfagent stacks RUN` shows where every thread of every rank stands. Of several "
    "ranks the one whose stack differs is the one that the others wait for; one that waits for its loader has a worker hanging."
)
"""For a run that is heard and whose steps do not end any more."""

PEER_REMEDY = (
    "The error says that the process at the other end was gone: look at the other ranks for one that ended or fell silent before "
    "it, at their hosts (a kill, memory) and at the network between them; fix the cause, and start the run again from its last "
    "checkpoint."
)
"""For a rank that failed because it lost another, when nothing tells of that other one."""

_OOM_REMEDIES = {
    "gpu": REMEDIES["oom_observed"],
    "host": (
        "It is the host's memory, not the GPU's: use fewer DataLoader workers (num_workers) and a lower prefetch_factor, read "
        "data piece by piece (memory-mapped files) instead of keeping it all in memory, keep it in arrays, which workers share, "
        "instead of lists of Python objects, which each of them copies, and drop what is kept of every step (lists of losses or "
        "outputs). Then raise the limit of the container, the control group or the batch job."
    ),
    "shared": (
        "Workers pass batches in /dev/shm, which is 64 MB in a container unless more is asked for: start it with --shm-size=8g "
        "or --ipc=host (Kubernetes: an emptyDir with medium: Memory on /dev/shm). Until then use fewer workers, a lower "
        "prefetch_factor, or num_workers=0."
    ),
}


def oom_remedy(memory: str) -> str:
    """The fix when memory ran out, by which it was (`rules.memory.memory_of`)."""
    return _OOM_REMEDIES.get(memory, REMEDIES["oom_observed"])


_NATIVE = ("SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL")
_AGAIN = "and start the run again from its last checkpoint."


def crash_remedy(state: str, reason: str, exception: str, traceback: str) -> str:
    """The fix for a process that ended badly, by what is known of its end: an exception, a signal or an exit code."""
    if exception == "SystemExit" or reason.startswith("exit code"):
        return f"The script ended itself: look at what it printed last, and for sys.exit() in its code; fix the cause, {_AGAIN}"
    if exception or traceback:
        return f"Read the exception, fix its cause, {_AGAIN}"
    if "SIGBUS" in reason:
        return (
            "A file that was mapped into memory could not be read or written: most often /dev/shm is full (start the container "
            "with --shm-size=8g or --ipc=host, or use fewer DataLoader workers), or a mapped data file was cut short or its disk "
            f"failed; fix the cause, {_AGAIN}"
        )
    if any(signal in reason for signal in _NATIVE):
        return (
            "It crashed outside of Python: start it with PYTHONFAULTHANDLER=1 to see the line, look at what it printed last, and "
            f"at the versions of torch, driver and compiled extensions; fix the cause, {_AGAIN}"
        )
    if state == "killed":
        return (
            "It could not say why: look for who sent the signal, such as the kernel when memory ran out (dmesg), a limit of "
            f"the container or of the batch system (time, memory), or a person; fix the cause, {_AGAIN}"
        )
    return REMEDIES["process_crash"]
