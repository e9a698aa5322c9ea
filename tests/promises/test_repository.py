"""What we promise about the repository itself."""

from __future__ import annotations

import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).parents[2]


def tracked(*patterns: str) -> list[pathlib.Path]:
    names = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def text_of(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return ""


def test_no_file_leans_on_something_outside_the_repository() -> None:
    outside = re.compile(r"\.\./" + "sha" + r"red\b|/wo" + r"rk/")
    assert [path.relative_to(ROOT) for path in tracked() if outside.search(text_of(path))] == []


def test_constraints_pin_every_version_and_name_no_index() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line


def test_no_source_file_has_a_name_that_says_nothing() -> None:
    vague = {"util", "utils", "helper", "helpers", "common", "misc", "base"}
    assert [path.name for path in tracked("*.py") if path.stem in vague] == []


def test_the_server_never_unpickles_and_never_evaluates_text() -> None:
    banned = re.compile(r"\b(pickle\.loads?|marshal\.loads?|yaml\.load|eval|exec)\(")
    sources = tracked("server/*.py", "client/*.py", "dashboard/*.py")
    assert [str(path.relative_to(ROOT)) for path in sources if banned.search(text_of(path))] == []
