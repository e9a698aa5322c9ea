"""Scripts in processes of their own, which record what the agent would send."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import preloaded
from builders import job_environment
from whole_end import IN_A_SCRIPT

__all__ = ["run_script"]


def run_script(
    folder: Path, script: Path | str, *words: str, fresh: bool = False, **environment: str
) -> preloaded.Ended:
    """Runs a file, or the text of one, to its end. It records below folder/record, if the environment names no other place.

    fresh: in an interpreter of its own, and not in a fork of one that has imported torch and perfagent.
    """
    if isinstance(script, str):
        text = IN_A_SCRIPT + textwrap.dedent(script)
        (script := folder / "script.py").write_text(text, encoding="utf-8")
    given = {"PERFAGENT_RECORD": str(folder / "record"), "OMP_NUM_THREADS": "1"} | environment
    variables = job_environment(folder, **given)
    if not fresh:
        [ended] = preloaded.run([str(script), *words], folder, [variables])
        return ended
    command = [sys.executable, str(script), *words]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=150)
    return preloaded.Ended(done.returncode, done.stdout, done.stderr)
