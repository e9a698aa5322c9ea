"""What is told of the script's repository, compared with what git itself says of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from perfagent.context.git import MOST_S, ChangedFiles, Repository, find

pytestmark = pytest.mark.real

GIT = 'git() { command git -c user.email=a@b -c user.name=n -c protocol.file.allow=always "$@"; }\n'


def sh(folder: Path, script: str) -> str:
    """What a shell says there, in which `git` knows who commits."""
    done = subprocess.run(["sh", "-ec", GIT + script], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with two commits and files in folders."""
    root = tmp_path / "tree"
    (root / "a" / "b").mkdir(parents=True)
    for name in ("train.py", "a/model.py", "a/b/data.py"):
        (root / name).write_text(f"# {name}\n")
    sh(root, "git init -q -b main; git add .; git commit -qm one; git commit -qm two --allow-empty")
    return root


def repository(folder: Path) -> Repository:
    found = find(folder)
    assert found is not None
    return found


def dirty(folder: Path) -> bool | None:
    told: list[bool | None] = []
    look = ChangedFiles(repository(folder).root, told.append)
    while look.poll():
        pass
    return (told or [None])[0]


def test_commit_and_branch_are_those_of_git(tree: Path) -> None:
    inside, other = tree / "a" / "b", tree.parent / "other"
    head, before = sh(tree, "git rev-parse HEAD HEAD~1").split()
    assert repository(inside).describe() == {"commit": head, "branch": "main"}
    sh(tree, "git pack-refs --all")
    assert repository(inside).commit() == head
    sh(tree, f"git worktree add -q -b side/way '{other}' HEAD~1")
    assert repository(other).describe() == {"commit": before, "branch": "side/way"}
    sh(tree, "git checkout -q --detach HEAD~1")
    assert repository(tree).describe() == {"commit": before}
    (tree / ".git" / "HEAD").write_text("ref: refs/heads/.invalid\n")  # references in tables, which we cannot read
    assert repository(tree).describe() == {}


@pytest.mark.fault
def test_x10_the_remote_is_told_without_credentials(tmp_path: Path) -> None:
    sh(tmp_path, "git init -q; git remote add origin /srv/git/repo")
    for address, shown in (
        ("/srv/git/repo", "/srv/git/repo"),
        ("https://me:hunter2@gitlab.example.com/team/repo.git", "https://gitlab.example.com/team/repo.git"),
        ("https://plaintoken@example.com/team/repo", "https://example.com/team/repo"),
        ("git@github.com:team/repo.git", "git@github.com:team/repo.git"),
        ("https://example.com/repo?private_token=hunter2", "https://example.com/repo?private_token=[redacted]"),
        ("https://me:hun@ter2@example.com/team/repo;1", "https://example.com/team/repo;1"),  # git writes it in quotes
    ):
        sh(tmp_path, f"git remote set-url origin '{address}'")
        assert repository(tmp_path).remote() == shown


EDIT = "echo '# another' > a/model.py;"
SUBMODULE = 'git clone -q . ../other; git submodule --quiet add "$(realpath ../other)" a/module; git commit -qm module;'


@pytest.mark.parametrize(
    ("happens", "changed"),
    [
        ("touch a/model.py new", False),
        (EDIT, True),
        (EDIT + "git add .", True),
        ("rm a/b/data.py", True),
        (SUBMODULE, False),
        (SUBMODULE + "cd a/module; git checkout -q HEAD~1", True),
        ("echo '*.py filter=none' > .gitattributes; git add .; git commit -qm filters", False),
    ],
)
def test_changed_files_are_told_as_git_sees_them(tree: Path, happens: str, changed: bool) -> None:
    sh(tree, happens)
    index = (tree / ".git" / "index").stat()
    assert dirty(tree) is changed
    assert (tree / ".git" / "index").stat().st_mtime_ns == index.st_mtime_ns, "nothing of the repository is written"


@pytest.mark.parametrize("program", ["exit 128", "echo '## main'; exec sleep 60", None])
def test_where_git_fails_hangs_or_is_missing_nothing_is_told(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None
) -> None:
    if program is not None:
        (tmp_path / "git").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + (":/usr/bin:/bin" if program else ""))
    times = iter([0.0, 1.0, MOST_S])
    look = ChangedFiles(tree, lambda _: pytest.fail("it cannot know"), clock=lambda: next(times))
    answers = [look.poll()]
    while answers[-1]:
        answers.append(look.poll())
    assert answers == ([True, False] if program and "sleep" in program else [False])
