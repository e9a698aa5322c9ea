"""Memory that runs out for real: the exception reaches the script as it was, and what the agent says of it is true."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from report import Result, compared
from stage import Stage
from training import SIZES, Training, recorded

SPARE_BYTES = 2 * 2**30


def check(stage: Stage) -> list[Result]:
    folder = stage.recording("memory")
    command = [sys.executable, __file__, stage.device, stage.size("small"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = done.stdout.splitlines()
    if not lines:
        raise RuntimeError(f"the training process said nothing and ended with {done.returncode}: {done.stderr[-2000:]}")
    truth = json.loads(lines[-1])
    recording = recorded(folder)
    found = next(
        (data for kind, _, data in recording.events if kind == "finding" and data.get("rule") == "oom_observed"), None
    )
    ends = [data.get("state") for kind, _, data in recording.events if kind == "state"]
    expected = "RuntimeError" if stage.dry else "OutOfMemoryError"
    results = [
        Result(
            "running out of memory: the script's exception",
            f"{expected}, exit code 1",
            f"{_raised(done.stderr)}, exit code {done.returncode}",
            "pass" if _raised(done.stderr) == expected and done.returncode == 1 else "FAIL",
        ),
        Result(
            "... how the run ended",
            "oom",
            str(ends[-1] if ends else None),
            "pass" if ends and ends[-1] == "oom" else "FAIL",
        ),
    ]
    if found is None:
        return [*results, Result("... the finding", "one", "none", "FAIL")]
    evidence = found["evidence"]
    sizes = evidence["categories"]
    results += [
        compared(
            "... the allocation that failed",
            evidence["tried_bytes"] / 2**30,
            truth["asked"] / 2**30,
            unit="GiB",
            share=0.01,
        ),
        compared("... parameters", sizes["parameters"] / 2**20, truth["parameters"] / 2**20, unit="MiB"),
        compared("... optimizer state", sizes["optimizer_state"] / 2**20, truth["state"] / 2**20, unit="MiB"),
    ]
    if not stage.dry:
        allocated = evidence["allocator"]["allocated_bytes.all.current"]
        results += [
            compared(
                "... all categories together", sum(sizes.values()) / 2**30, allocated / 2**30, unit="GiB", share=0.001
            ),
            compared("... capacity", evidence["capacity_bytes"] / 2**30, truth["capacity"] / 2**30, unit="GiB"),
        ]
    step = evidence["step"]
    results.append(Result("... the step", str(truth["step"]), str(step), "pass" if step == truth["step"] else "FAIL"))
    return results


def _raised(stderr: str) -> str:
    """The class of the exception that ended the script."""
    last = [line for line in stderr.splitlines() if line and not line.startswith(" ")]
    named = [line.partition(":")[0].rpartition(".")[2] for line in last if "Error" in line.partition(":")[0]]
    return named[-1] if named else "none"


def main(device: str, size: str, folder: str) -> None:
    """Trains, fills the device but for 2 GiB, and asks for twice as much inside of the model."""
    import perfagent

    training = Training(SIZES[size], device)
    torch = training.torch
    perfagent.attach(training.model, training.optimizer, record=folder, project="gpu-check")
    for _ in range(20):
        training.step()
    training.wait()
    state = [
        value
        for entry in training.optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    ]
    truth: dict[str, Any] = {
        "parameters": sum(weight.untyped_storage().nbytes() for weight in training.model.parameters()),
        "state": sum(value.untyped_storage().nbytes() for value in state if value.device.type == device),
        "step": 21,
        "asked": 2**50,
    }
    ballast = []
    if device == "cuda":
        free, truth["capacity"] = torch.cuda.mem_get_info()
        ballast.append(torch.empty(free - SPARE_BYTES, dtype=torch.uint8, device=device))
        truth["asked"] = 2 * SPARE_BYTES
        truth["capacity"] = torch.cuda.get_device_properties(0).total_memory
    block = training.model.blocks[0]
    inner = block.forward

    def greedy(x: Any) -> Any:
        ballast.append(torch.empty(truth["asked"], dtype=torch.uint8, device=device))
        return inner(x)

    block.forward = greedy
    sys.stdout.write(json.dumps(truth) + "\n")
    sys.stdout.flush()
    training.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
