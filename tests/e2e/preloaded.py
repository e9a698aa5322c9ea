"""Runs Python scripts, each in a fork of this process, which has imported torch once: five seconds of the start of each.

A line of JSON in: {"arguments": [script, ...], "environments": [{...}, ...], "folder": ...}, a process for each environment; what
process N says goes to output-N.txt in the folder. A line of JSON out: their exit codes. Ends at the end of its input.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # noqa: F401 - the first optimizer imports it


def start(job: dict[str, Any], number: int) -> int:
    """In the fork this returns when the script has ended; the process is then to end as any does."""
    child = os.fork()
    if child:
        return child
    output = os.open(Path(job["folder"]) / f"output-{number}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(job["environments"][number])
    sys.argv = job["arguments"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    for line in sys.stdin:
        wanted = json.loads(line)
        children = [start(wanted, number) for number in range(len(wanted["environments"]))]
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
