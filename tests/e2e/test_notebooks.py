"""The notebooks of examples/notebooks run from top to bottom, and show what is kept in them.

`pytest tests/e2e/test_notebooks.py --snapshot-update` keeps what they show now, without this machine's names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from builders import ServerProcess, job_environment
from documents import ROOT

pytestmark = pytest.mark.real
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
DEFAULT = "http://127.0.0.1:8420"
"""Where a reader's server is, and where links in the kept outputs lead."""


def executed(notebook: Any, server: ServerProcess, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The notebook with what its cells show now."""
    for name, value in job_environment(
        folder, PERFAGENT_SERVER=server.url, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"
    ).items():
        monkeypatch.setenv(name, value)
    client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", record_timing=False)
    done = client.execute(cwd=str(folder))
    for cell in done.cells:
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr", output.text
            output.get("metadata", {}).clear()
            data = output.get("data", {})
            if "text/html" in data:  # the plain text has the same, with times
                output["data"] = {"text/html": data["text/html"].replace(server.url, DEFAULT)}
    done.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    return done


def shown(notebook: Any) -> list[tuple[str, list[str]]]:
    """Of each cell what it prints but for fractions, in however many pieces, and the kinds of its other outputs."""
    found = []
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        printed = "".join(output.text for output in outputs if output.output_type == "stream")
        others = [" ".join(output.data) for output in outputs if output.output_type != "stream"]
        found.append((re.sub(r"\d*\.\d+", "0.0", printed), others))
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_kept_in_it(
    path: Path,
    shared_server: ServerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    kept = nbformat.read(path, as_version=4)
    done = executed(nbformat.read(path, as_version=4), shared_server, tmp_path, monkeypatch)
    if request.config.getoption("update_snapshots"):
        path.write_text(nbformat.writes(done) + "\n")
        kept = done
    assert shown(done) == shown(kept)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_names_no_machine(path: Path) -> None:
    text = path.read_text("utf-8")
    assert str(Path.home()) not in text and str(ROOT) not in text and not re.search(r"\b20\d\d-\d\d", text)
    assert {*re.findall(r"https?://[\w.:]+", text)} <= {DEFAULT, "http://www.w3.org"}
