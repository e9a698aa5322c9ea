"""Every block of code in the documents: Python runs and prints what the page says, the others are what they claim to be."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from builders import ServerProcess, job_environment
from code_blocks import GIVEN, Script, commands, prints, scripts
from documents import ROOT, Document, documents
from preloaded import run

pytestmark = pytest.mark.real
BETWEEN = "\x1e"
"""Printed between two blocks."""


def shell(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, capture_output=True)


def python(text: str) -> None:
    compile(text, "block", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


READ: dict[str, Callable[[str], object]] = {
    "python": python, "sh": shell, "bash": shell, "json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load,
}  # fmt: skip
AS_IT_IS = {"text", "diff", "sql", "nginx", ""}


def test_every_block_is_in_the_language_that_it_names() -> None:
    wrong = []
    for page in documents():
        for piece in page.code():
            if piece.language is None or piece.language in AS_IT_IS:
                continue
            try:
                READ[piece.language](piece.text)
            except (KeyError, SyntaxError, ValueError, yaml.YAMLError, subprocess.CalledProcessError) as problem:
                wrong.append(f"{page.name}:{piece.line}: {piece.language}: {problem!r:.150}")
    assert wrong == []


@pytest.fixture(scope="module")
def known(shared_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    """A server that has the run of examples/nan.py."""
    environment = job_environment(
        tmp_path_factory.mktemp("nan"), PERFAGENT_SERVER=shared_server.url, PERFAGENT_RUN_ID="nan"
    )
    subprocess.run(
        [sys.executable, str(ROOT / "examples" / "nan.py")], env=environment, check=True, capture_output=True
    )
    shared_server.wait_for_state("nan", "finished")
    return shared_server


def test_the_readme_shows_what_the_run_with_a_nan_prints(known: ServerProcess, tmp_path: Path) -> None:
    environment = job_environment(tmp_path, PERFAGENT_SERVER=known.url)
    command = [sys.executable, "-m", "perfagent", "show", "nan"]
    shown = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    blocks = Document(ROOT / "README.md", (ROOT / "README.md").read_text("utf-8")).code()
    [block] = [piece.text for piece in blocks if piece.text.startswith("VERDICT")]
    assert prints(f"...{block.removesuffix(chr(10))}...", shown), shown


ALL = [script for page in documents() if not page.twin for script in scripts(page)]
"""Those of a Chinese page are its English twin's: tests/promises/test_translations.py."""


@pytest.mark.parametrize("script", ALL, ids=[script.name for script in ALL])
def test_the_python_of_a_page_runs_and_prints_what_it_says(
    script: Script, known: ServerProcess, tmp_path: Path
) -> None:
    written = tmp_path / "script.py"
    parts = [(GIVEN / f"{script.given}.py").read_text("utf-8"), *(block.text for block in script.blocks)]
    written.write_text(f"\nprint({BETWEEN!r}, end='', flush=True)\n".join(parts), "utf-8")
    environment = {"PERFAGENT_SERVER": known.url, "ACCELERATE_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}
    [done] = run([str(written)], tmp_path, [job_environment(tmp_path, **environment)])
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    printed = done.stdout.split(BETWEEN)[1:]
    for place, expected in script.printed.items():
        assert prints(expected, printed[place]), printed[place]


COMMANDS = [script for page in documents() if not page.twin for script in commands(page)]


@pytest.mark.parametrize("script", COMMANDS, ids=[script.name for script in COMMANDS])
def test_the_commands_of_a_page_print_what_it_says(script: Script, known: ServerProcess, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = job_environment(tmp_path, PERFAGENT_SERVER=known.url, PATH=path, GIVEN=str(GIVEN), COLUMNS="200")
    given, [block] = GIVEN / f"{script.given}.sh", script.blocks

    def shell(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", "-ec", text], cwd=tmp_path, env=environment, capture_output=True, text=True)

    if given.exists():
        before = shell(given.read_text("utf-8"))
        assert before.returncode == 0, before.stderr[-3000:]
    done = shell(block.text)
    assert done.returncode == 0, done.stderr[-3000:]
    assert prints(script.printed.get(0, "..."), done.stdout), done.stdout
