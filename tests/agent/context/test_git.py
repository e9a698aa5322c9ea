"""What is told of the script's repository, compared with what git itself says of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perfagent.context.git import Repository, find

pytestmark = pytest.mark.real

GIT = 'git() { command git -c user.email=a@b -c user.name=n -c protocol.file.allow=always "$@"; }\n'


def sh(folder: Path, script: str) -> str:
    """What a shell says there, in which `git` knows who commits."""
    done = subprocess.run(["sh", "-ec", GIT + script], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with two commits, files in folders, a link and a program, written long before its index."""
    root = tmp_path / "tree"
    (root / "a" / "b").mkdir(parents=True)
    for name in ("train.py", "a/model.py", "a/b/data.py", "empty"):
        (root / name).write_text(f"# {name}\n" if name != "empty" else "")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("train.py")
    old = time.time() - 1000
    for path in root.rglob("*"):
        os.utime(path, (old, old), follow_symlinks=False)
    sh(root, "git init -q -b main; git add .; git commit -qm one; git commit -qm two --allow-empty")
    return root


def repository(folder: Path) -> Repository:
    found = find(folder)
    assert found is not None
    return found


def dirty(folder: Path) -> bool | None:
    return (None, *repository(folder).changes())[-1]


def expected(folder: Path) -> bool:
    """What git itself says."""
    return bool(sh(folder, "git status --porcelain --untracked-files=no"))


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


def test_it_is_the_repository_of_the_script_or_working_folder(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the working folder for an installed program and a notebook."""
    other = tmp_path / "other"
    for folder in ("src", "env/bin", "env/lib/python3.11/site-packages/package"):
        (other / folder).mkdir(parents=True)
    sh(other, "git init -q")
    monkeypatch.setattr(sys, "prefix", str(other / "env"))
    monkeypatch.chdir(tree)

    def root(script: str) -> Path:
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(other / script), raising=False)
        found = find()
        assert found is not None
        return found.root

    assert root("src/train.py") == other
    assert root("env/bin/accelerate") == root("env/lib/python3.11/site-packages/package/__main__.py") == tree
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert find() == repository(tree)


def test_before_the_first_commit_there_is_only_a_branch(tmp_path: Path) -> None:
    sh(tmp_path, "git init -q -b main")
    assert repository(tmp_path).describe() == {"branch": "main"}
    assert find(Path("/proc")) is None


@pytest.mark.fault
def test_x10_the_remote_is_told_without_credentials(tmp_path: Path) -> None:
    sh(tmp_path, "git init -q; git remote add origin /srv/git/repo")
    assert repository(tmp_path).remote() == "/srv/git/repo"
    for address, shown in (
        ("https://github.com/team/repo.git", "https://github.com/team/repo.git"),
        ("https://me:hunter2@gitlab.example.com/team/repo.git", "https://gitlab.example.com/team/repo.git"),
        ("https://plaintoken@example.com/team/repo", "https://example.com/team/repo"),
        ("ssh://git@example.com:22/team/repo", "ssh://example.com:22/team/repo"),
        ("git@github.com:team/repo.git", "git@github.com:team/repo.git"),
        ("https://example.com/repo?private_token=hunter2", "https://example.com/repo?private_token=[redacted]"),
        ("https://me:hun@ter2@example.com/team/repo", "https://example.com/team/repo"),
        ("https://me:hunter2@example.com/team/repo;1", "https://example.com/team/repo;1"),  # git writes it in quotes
    ):
        sh(tmp_path, f"git remote set-url origin '{address}'")
        assert repository(tmp_path).remote() == shown


def test_the_remote_is_the_one_that_the_branch_is_pushed_to(tree: Path) -> None:
    sh(tree, "git remote add origin /srv/origin; git remote add fork /srv/fork")
    assert repository(tree).remote() == "/srv/origin"
    sh(tree, "git config branch.main.remote fork")
    assert repository(tree).remote() == "/srv/fork"


def test_a_configuration_that_was_written_by_hand_is_read(tree: Path) -> None:
    (tree / ".git" / "config").write_text(
        'stray = 1\n; a comment\n[core]\n\tFileMode=false\n\tbare\n# another\n[remote "a=b"]\n URL = ssh://x/y=z\n'
        '\tfetch = +refs/heads/*:refs/remotes/a/*\n\n[remote "empty"]\n[core]\n\tautocrlf = input\n[broken\n'
    )
    assert repository(tree).remote() == "ssh://x/y=z"
    (tree / "train.py").chmod(0o755)
    assert dirty(tree) is False, "modes do not count"


EDIT = "echo '# another' > a/model.py;"
STAGE = EDIT + "git add .;"
COMMIT = STAGE + "git commit -qm three;"
RESTORED = STAGE + "git restore --staged --worktree .;"
SUBMODULE = f"""
git clone -q . ../other; git submodule --quiet add "$(realpath ../other)" a/module; git commit -qm module; {RESTORED}
"""
IN_SUBMODULE = SUBMODULE + "echo '# another' > a/module/a/model.py;"
SPARSE = """
git sparse-checkout set --cone --sparse-index nothing
echo '# another' > train.py; git add train.py; git restore --staged --worktree train.py
"""
HAPPENS = {
    "nothing": "",
    "edited": EDIT,
    "edited in the same length": "echo '# a/model.yp' > a/model.py",
    "touched": "touch a/model.py",
    "staged": STAGE,
    "staged and put back": f"cp a/model.py ../before; {STAGE} cp ../before a/model.py",
    "staged and restored": RESTORED,
    "committed": COMMIT,
    "removed": "rm a/b/data.py",
    "new": "touch notes",
    "new and added": "touch notes; git add notes",
    "new, added and taken out": "touch notes; git add notes; git rm -q --cached notes",
    "announced": "touch notes; git add -N notes",
    "taken out": "git rm -q --cached a/b/data.py",
    "taken out and added": "git rm -q --cached a/b/data.py; git add a/b/data.py",
    "made a program": "chmod +x train.py",
    "made a program in the index": "git update-index --chmod=+x train.py; git config core.filemode false",
    "a program where modes do not count": """
        git config extensions.worktreeConfig true; git config --worktree core.filemode false; chmod +x train.py""",
    "a link to another file": "ln -sf empty link",
    "a commit taken back": COMMIT + "git reset -q --soft HEAD~1",
    "another branch": COMMIT + "git checkout -q -b side HEAD~1",
    "stashed, fetched back and dropped": EDIT + "git stash -q; git stash pop -q; git checkout -q .",
    "merged in vain": COMMIT + """
        git checkout -q -b side HEAD~1; echo '# a third' > a/model.py; git commit -qam four; ! git merge -q main""",
    "names that sort oddly": f"""
        for name in a.py a-b/c.py a0 a/b.py a/b0/c/d.py a/é zz/1/2/3/4
        do mkdir -p "$(dirname $name)"; echo $name > $name; done; git add .; git commit -qm names; {RESTORED}""",
    "the newest index, edited": "git update-index --index-version 4;" + EDIT,
    "the newest index, restored": "git update-index --index-version 4;" + RESTORED,
    "packed and staged": "git gc -q;" + STAGE,
    "packed and restored": "git gc -q;" + RESTORED,
    "a commit taken back in a pack": COMMIT + "git gc -q; git reset -q --soft HEAD~1",
    "a submodule": SUBMODULE,
    "edited in a submodule": IN_SUBMODULE,
    "another commit in a submodule": IN_SUBMODULE + "cd a/module; git commit -qam ahead",
    "a submodule that is not checked out": SUBMODULE + "git submodule --quiet deinit a/module",
    "a submodule whose folder is gone": SUBMODULE + "rm -r a/module",
    "half of it checked out": SPARSE,
    "half of it checked out and staged": SPARSE + "echo '# another' > train.py; git add train.py",
    "2,100 files": f"mkdir many; cd many; seq 2100 | xargs touch; git add .; git commit -qm many; cd ..; {RESTORED}",
}  # fmt: skip


@pytest.mark.parametrize("happens", HAPPENS.values(), ids=HAPPENS.keys())
def test_changed_files_are_seen_as_git_sees_them(tree: Path, happens: str) -> None:
    sh(tree, happens)
    *pieces, found = repository(tree).changes()  # before git is asked: it refreshes the index
    assert found is expected(tree)
    assert set(pieces) <= {None}
    if "2100" in happens:
        assert len(pieces) > 20, "worked through in pieces"


def test_a_clone_and_a_copy_of_it_are_clean(tree: Path) -> None:
    clone, copy = tree.parent / "clone", tree.parent / "copy"
    sh(tree, "git clone -q . ../clone")
    assert dirty(clone) is False
    shutil.copytree(clone, copy, symlinks=True)
    for path in copy.rglob("*.py"):
        path.touch()  # as a copy that keeps no times
    assert dirty(copy) is False


def test_a_clone_that_borrows_its_objects_is_seen_as_by_git(tree: Path) -> None:
    clone = tree.parent / "clone"
    sh(tree, "git clone -q --shared . ../clone")
    sh(clone, RESTORED)
    assert dirty(clone) is expected(clone) is False
    sh(clone, STAGE)
    assert dirty(clone) is expected(clone) is True


# ---- what cannot be known is not told


def test_with_a_commit_that_cannot_be_read_there_is_no_answer(tree: Path) -> None:
    sh(tree, "git config pack.indexVersion 1; git repack -a -d -q; git prune-packed")
    assert dirty(tree) is False
    sh(tree, RESTORED)
    assert dirty(tree) is None


@pytest.mark.fault
def test_references_in_tables_are_not_guessed(tree: Path) -> None:
    (tree / ".git" / "HEAD").write_text("ref: refs/heads/.invalid\n")
    assert repository(tree).describe() == {}
    assert dirty(tree) is None


def test_what_a_filter_or_line_ends_change_is_not_called_changed(tree: Path) -> None:
    filters = "git config filter.up.clean 'tr a-z A-Z'; git config filter.up.smudge 'tr A-Z a-z';"
    sh(
        tree,
        filters
        + "echo '*.bin filter=up' > a/.gitattributes; echo weights > a/x.bin; git add .; git commit -qm filtered",
    )
    (tree / "a" / "x.bin").touch()
    assert (dirty(tree), expected(tree)) == (None, False)
    sh(tree, "git rm -q a/x.bin; git commit -qm without; printf 'one\\r\\ntwo\\r\\n' > lines.txt")
    sh(
        tree, "git -c core.autocrlf=input add lines.txt; git commit -qm lines"
    )  # as a line of ~/.gitconfig would have it
    (tree / "lines.txt").touch()
    assert dirty(tree) is None
    sh(tree, "git rm -q a/.gitattributes; git commit -qm 'no attributes'")
    (tree / "lines.txt").write_bytes(b"one\r\nTWO\r\n")
    assert dirty(tree) is True


def test_what_only_a_filter_or_a_newer_git_knows_is_not_told(tree: Path) -> None:
    sh(tree, "echo '*.py filter=lfs' > .gitattributes; git add .gitattributes; git commit -qm filters")
    (tree / "train.py").write_text("# rtain.py\n")  # the length of the old one
    assert dirty(tree) is None
    sh(tree, "git config --unset-all core.bare")
    (tree / ".git" / "index").write_bytes(b"DIRC\0\0\0\x09\0\0\0\x01")
    assert dirty(tree) is None
    (tree / ".git" / "index").unlink()
    assert dirty(tree) is None
