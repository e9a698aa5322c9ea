from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from perfagent.context.packages import installed


def test_packages_are_those_that_importlib_knows() -> None:
    *_, found = installed()
    known = {
        re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower(): one.version
        for one in reversed(list(importlib.metadata.distributions()))
    }
    assert found == known
    assert found["torch"].startswith("2.")


def test_the_first_on_the_path_counts_and_odd_folders_do_no_harm(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    (first / "My_Package-1.0.dist-info").mkdir(parents=True)
    (second / "my.package-2.0.dist-info").mkdir(parents=True)
    (second / "old-0.5-py3.11.egg-info").mkdir()
    (second / "linked.egg-info").mkdir()
    (second / "linked.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: linked\nVersion: 3.1.dev0\n")
    (second / "broken.dist-info").mkdir()
    *_, found = installed([str(first), str(second), str(tmp_path / "none"), str(tmp_path / "x.zip")])
    assert found == {"my-package": "1.0", "old": "0.5", "linked": "3.1.dev0"}
