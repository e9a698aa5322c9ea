"""The built site, which two files of tests read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = ["-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "website" / "mkdocs.yml"), "-d", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "SITE_URL": "https://docs.example/"}
    built = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)
    assert built.returncode == 0, built.stderr
    return folder
