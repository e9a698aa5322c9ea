from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeVar, cast

import pytest

from perfagent.context.git import Repository, _Index, find

T = TypeVar("T")


def git(folder: Path, *words: str) -> str:
    command = [
        "git",
        "-C",
        str(folder),
        "-c",
        "user.email=a@b",
        "-c",
        "user.name=n",
        "-c",
        "protocol.file.allow=always",
        *words,
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


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
    git(root, "init", "-q", "-b", "main")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "one")
    git(root, "commit", "-q", "--allow-empty", "-m", "two")
    return root


def repository(folder: Path) -> Repository:
    found = find(folder)
    assert found is not None
    return found


def dirty(folder: Path) -> bool | None:
    return (None, *repository(folder).changes())[-1]


def expected(folder: Path) -> bool:
    """What git itself says."""
    return bool(git(folder, "status", "--porcelain", "--untracked-files=no"))


def test_commit_and_branch_are_those_of_git(tree: Path) -> None:
    inside = tree / "a" / "b"
    assert repository(inside).describe() == {"commit": git(tree, "rev-parse", "HEAD"), "branch": "main"}
    git(tree, "pack-refs", "--all")
    assert repository(inside).commit() == git(tree, "rev-parse", "HEAD")
    git(tree, "worktree", "add", "-q", "-b", "side/way", str(tree.parent / "other"), "HEAD~1")
    assert repository(tree.parent / "other").describe() == {
        "commit": git(tree, "rev-parse", "HEAD~1"),
        "branch": "side/way",
    }
    git(tree, "checkout", "-q", "--detach", "HEAD~1")
    assert repository(tree).describe() == {"commit": git(tree, "rev-parse", "HEAD")}


def test_it_is_the_scripts_repository_and_that_of_the_working_folder_for_an_installed_program(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    for folder in ("src", "env/bin", "env/lib/python3.11/site-packages/package"):
        (other / folder).mkdir(parents=True)
    git(other, "init", "-q")
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
    assert find() == repository(tree)  # a notebook


def test_before_the_first_commit_there_is_only_a_branch(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    assert repository(tmp_path).describe() == {"branch": "main"}
    assert find(Path("/proc")) is None


@pytest.mark.fault
@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://github.com/team/repo.git", "https://github.com/team/repo.git"),
        ("https://me:hunter2@gitlab.example.com/team/repo.git", "https://gitlab.example.com/team/repo.git"),
        ("https://plaintoken@example.com/team/repo", "https://example.com/team/repo"),
        ("ssh://git@example.com:22/team/repo", "ssh://example.com:22/team/repo"),
        ("git@github.com:team/repo.git", "git@github.com:team/repo.git"),
        ("https://example.com/repo?private_token=hunter2", "https://example.com/repo?private_token=[redacted]"),
        ("/srv/git/repo", "/srv/git/repo"),
        ("https://me:hun@ter2@example.com/team/repo", "https://example.com/team/repo"),
        # git writes it between quotes
        ("https://me:hunter2@example.com/team/repo;1", "https://example.com/team/repo;1"),
    ],
)
def test_x10_the_remote_is_told_without_credentials(tree: Path, address: str, shown: str) -> None:
    git(tree, "remote", "add", "origin", address)
    assert repository(tree).remote() == shown


def test_the_remote_is_the_one_that_the_branch_is_pushed_to(tree: Path) -> None:
    git(tree, "remote", "add", "origin", "/srv/origin")
    git(tree, "remote", "add", "fork", "/srv/fork")
    assert repository(tree).remote() == "/srv/origin"
    git(tree, "config", "branch.main.remote", "fork")
    assert repository(tree).remote() == "/srv/fork"


def test_a_configuration_that_was_written_by_hand_is_read(tree: Path) -> None:
    (tree / ".git" / "config").write_text(
        'stray = 1\n; a comment\n[core]\n\tFileMode=false\n\tbare\n# another\n[remote "a=b"]\n URL = ssh://x/y=z\n'
        '\tfetch = +refs/heads/*:refs/remotes/a/*\n\n[remote "empty"]\n[core]\n\tautocrlf = input\n[broken\n'
    )
    assert repository(tree)._config()["core"] == {"filemode": "false", "bare": "", "autocrlf": "input", "[broken": ""}
    assert repository(tree).remote() == "ssh://x/y=z"


def edited(tree: Path) -> None:
    (tree / "a" / "model.py").write_text("# another\n")


def edited_in_the_same_length(tree: Path) -> None:
    (tree / "a" / "model.py").write_text("# a/model.yp\n")


def touched(tree: Path) -> None:
    (tree / "a" / "model.py").touch()


def staged(tree: Path) -> None:
    edited(tree)
    git(tree, "add", ".")


def staged_and_put_back(tree: Path) -> None:
    before = (tree / "a" / "model.py").read_text()
    staged(tree)
    (tree / "a" / "model.py").write_text(before)


def staged_and_committed(tree: Path) -> None:
    staged(tree)
    git(tree, "commit", "-q", "-m", "three")


def removed(tree: Path) -> None:
    (tree / "a" / "b" / "data.py").unlink()


def new_and_untracked(tree: Path) -> None:
    (tree / "notes.txt").write_text("x")


def new_and_added(tree: Path) -> None:
    new_and_untracked(tree)
    git(tree, "add", "notes.txt")


def made_a_program(tree: Path) -> None:
    (tree / "train.py").chmod(0o755)


def link_to_another(tree: Path) -> None:
    (tree / "link").unlink()
    (tree / "link").symlink_to("empty")


def commit_taken_back(tree: Path) -> None:
    staged_and_committed(tree)
    git(tree, "reset", "-q", "--soft", "HEAD~1")


def newest_index_format(tree: Path) -> None:
    git(tree, "update-index", "--index-version", "4")


def newest_index_format_and_edited(tree: Path) -> None:
    newest_index_format(tree)
    edited(tree)


def packed(tree: Path) -> None:
    git(tree, "gc", "-q")


def another_branch(tree: Path) -> None:
    staged_and_committed(tree)
    git(tree, "checkout", "-q", "-b", "side", "HEAD~1")


def staged_and_restored(tree: Path) -> None:
    staged(tree)
    git(tree, "restore", "--staged", "--worktree", ".")


def stashed_fetched_back_and_dropped(tree: Path) -> None:
    edited(tree)
    git(tree, "stash")
    git(tree, "stash", "pop", "-q")
    git(tree, "checkout", "-q", ".")


def new_and_added_and_taken_out(tree: Path) -> None:
    new_and_added(tree)
    git(tree, "rm", "-q", "--cached", "notes.txt")


def taken_out_and_added(tree: Path) -> None:
    git(tree, "rm", "-q", "--cached", "a/b/data.py")
    git(tree, "add", "a/b/data.py")


def taken_out(tree: Path) -> None:
    git(tree, "rm", "-q", "--cached", "a/b/data.py")


def made_a_program_in_the_index(tree: Path) -> None:
    git(tree, "update-index", "--chmod=+x", "train.py")
    git(tree, "config", "core.filemode", "false")


def names_that_sort_oddly(tree: Path) -> None:
    for name in ("a.py", "a-b/c.py", "a0", "a/b.py", "a/b0/c/d.py", "a/é", "zz/1/2/3/4"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "names")
    staged_and_restored(tree)


def a_submodule(tree: Path) -> None:
    git(tree, "clone", "-q", ".", str(tree.parent / "other"))
    git(tree, "submodule", "--quiet", "add", str(tree.parent / "other"), "a/module")
    git(tree, "commit", "-q", "-m", "module")
    staged_and_restored(tree)


def edited_in_a_submodule(tree: Path) -> None:
    a_submodule(tree)
    edited(tree / "a" / "module")


def another_commit_in_a_submodule(tree: Path) -> None:
    edited_in_a_submodule(tree)
    git(tree / "a" / "module", "commit", "-q", "-a", "-m", "ahead")


def a_submodule_that_is_not_checked_out(tree: Path) -> None:
    a_submodule(tree)
    git(tree, "submodule", "--quiet", "deinit", "a/module")


def a_submodule_whose_folder_is_gone(tree: Path) -> None:
    a_submodule(tree)
    shutil.rmtree(tree / "a" / "module")


def modes_do_not_count_in_this_worktree(tree: Path) -> None:
    git(tree, "config", "extensions.worktreeConfig", "true")
    git(tree, "config", "--worktree", "core.filemode", "false")
    made_a_program(tree)


def half_of_it_checked_out(tree: Path) -> None:
    git(tree, "sparse-checkout", "set", "--cone", "--sparse-index", "nothing")
    (tree / "train.py").write_text("# another\n")
    git(tree, "add", "train.py")
    git(tree, "restore", "--staged", "--worktree", "train.py")


def half_of_it_checked_out_and_staged(tree: Path) -> None:
    half_of_it_checked_out(tree)
    (tree / "train.py").write_text("# another\n")
    git(tree, "add", "train.py")


def announced(tree: Path) -> None:
    (tree / "notes").touch()
    git(tree, "add", "-N", "notes")


def merged_in_vain(tree: Path) -> None:
    another_branch(tree)
    (tree / "a" / "model.py").write_text("# a third\n")
    git(tree, "commit", "-q", "-a", "-m", "four")
    with pytest.raises(subprocess.CalledProcessError):
        git(tree, "merge", "-q", "main")


def packed_and_staged(tree: Path) -> None:
    packed(tree)
    staged(tree)


def packed_and_staged_and_restored(tree: Path) -> None:
    packed(tree)
    staged_and_restored(tree)


def commit_taken_back_in_a_pack(tree: Path) -> None:
    staged_and_committed(tree)
    packed(tree)
    git(tree, "reset", "-q", "--soft", "HEAD~1")


def newest_index_format_and_restored(tree: Path) -> None:
    newest_index_format(tree)
    staged_and_restored(tree)


@pytest.mark.parametrize(
    "happens",
    [
        lambda tree: None, edited, edited_in_the_same_length, touched, staged, staged_and_put_back, staged_and_committed, removed,
        new_and_untracked, new_and_added, made_a_program, link_to_another, commit_taken_back, newest_index_format,
        newest_index_format_and_edited, packed, another_branch, staged_and_restored, stashed_fetched_back_and_dropped,
        new_and_added_and_taken_out, taken_out_and_added, taken_out, made_a_program_in_the_index, names_that_sort_oddly,
        a_submodule, half_of_it_checked_out, half_of_it_checked_out_and_staged, announced, merged_in_vain, packed_and_staged,
        packed_and_staged_and_restored, commit_taken_back_in_a_pack, newest_index_format_and_restored, edited_in_a_submodule,
        another_commit_in_a_submodule, a_submodule_that_is_not_checked_out, a_submodule_whose_folder_is_gone,
        modes_do_not_count_in_this_worktree,
    ],
)  # fmt: skip
def test_changed_files_are_seen_as_git_sees_them(tree: Path, happens: Callable[[Path], None]) -> None:
    happens(tree)
    found = dirty(tree)  # before git is asked: it refreshes the index
    assert found is expected(tree)


def test_a_clone_and_a_copy_of_it_are_clean(tree: Path) -> None:
    git(tree, "clone", "-q", str(tree), str(tree.parent / "clone"))
    assert dirty(tree.parent / "clone") is False
    shutil.copytree(tree.parent / "clone", tree.parent / "copy", symlinks=True)
    for path in (tree.parent / "copy").rglob("*.py"):
        path.touch()  # as a copy that keeps no times
    assert dirty(tree.parent / "copy") is False


def test_a_clone_that_borrows_its_objects_is_seen_as_git_sees_it(tree: Path) -> None:
    clone = tree.parent / "clone"
    git(tree, "clone", "-q", "--shared", str(tree), str(clone))
    staged_and_restored(clone)
    assert dirty(clone) is expected(clone) is False
    staged(clone)
    assert dirty(clone) is expected(clone) is True


def test_a_big_index_is_worked_through_in_pieces(tree: Path) -> None:
    staged_and_restored(tree)
    oid = git(tree, "rev-parse", "HEAD:train.py")
    new = "".join(f"100644 {oid}\t{n % 7}/{n % 11}/{n:05d}.py\n" for n in range(5000))
    subprocess.run(["git", "-C", str(tree), "update-index", "--index-info"], input=new, check=True, text=True)
    found = [*repository(tree).changes()]
    assert found == [None] * (len(found) - 1) + [True]
    assert len(found) > 5
    git(tree, "commit", "-q", "-m", "big")
    index = _Index((tree / ".git" / "index").read_bytes(), 0)
    assert returned(index.rebuilt_tree()) == bytes.fromhex(git(tree, "rev-parse", "HEAD^{tree}"))


def returned(work: Generator[None, None, T]) -> T:
    while True:
        try:
            next(work)
        except StopIteration as end:
            return cast("T", end.value)


def test_with_a_commit_that_cannot_be_read_there_is_no_answer(tree: Path) -> None:
    git(tree, "config", "pack.indexVersion", "1")
    git(tree, "repack", "-a", "-d", "-q")
    git(tree, "prune-packed")
    assert dirty(tree) is False
    staged_and_restored(tree)
    assert dirty(tree) is None


@pytest.mark.fault
def test_references_in_tables_are_not_guessed(tree: Path) -> None:
    (tree / ".git" / "HEAD").write_text("ref: refs/heads/.invalid\n")
    assert repository(tree).describe() == {}
    assert dirty(tree) is None


def test_what_a_filter_of_a_folder_or_the_users_line_ends_change_is_not_called_changed(tree: Path) -> None:
    git(tree, "config", "filter.up.clean", "tr a-z A-Z")
    git(tree, "config", "filter.up.smudge", "tr A-Z a-z")
    (tree / "a" / ".gitattributes").write_text("*.bin filter=up\n")
    (tree / "a" / "x.bin").write_text("weights\n")
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "filtered")
    (tree / "a" / "x.bin").touch()
    assert dirty(tree) is None
    assert expected(tree) is False
    (tree / "a" / "x.bin").unlink()
    git(tree, "commit", "-q", "-a", "-m", "without")
    (tree / "lines.txt").write_bytes(b"one\r\ntwo\r\n")
    git(tree, "-c", "core.autocrlf=input", "add", "lines.txt")  # as a line of ~/.gitconfig would have it
    git(tree, "commit", "-q", "-m", "lines")
    (tree / "lines.txt").touch()
    assert dirty(tree) is None
    (tree / "a" / ".gitattributes").unlink()
    git(tree, "commit", "-q", "-a", "-m", "no attributes")
    (tree / "lines.txt").write_bytes(b"one\r\nTWO\r\n")
    assert dirty(tree) is True


def test_what_cannot_be_known_is_not_told(tree: Path) -> None:
    (tree / ".gitattributes").write_text("*.py filter=lfs\n")
    git(tree, "add", ".gitattributes")
    git(tree, "commit", "-q", "-m", "filters")
    (tree / "train.py").write_text("# rtain.py\n")  # the length of the old one: only the filter knows
    assert dirty(tree) is None
    git(tree, "config", "--unset-all", "core.bare")
    (tree / ".git" / "index").write_bytes(b"DIRC\0\0\0\x09\0\0\0\x01")
    assert dirty(tree) is None
    (tree / ".git" / "index").unlink()
    assert dirty(tree) is None
