"""A number of ours that became somebody else's is neither written to nor closed."""

from __future__ import annotations

import os
from pathlib import Path

from ticks import tick_of

from perfagent.delivery.spool import Spool
from perfagent.process.descriptors import opened

FLAGS = os.O_RDWR | os.O_CREAT


def take_over(fd: int, path: Path) -> None:
    """What a script does that closes every descriptor and opens a file of its own: the number is that file's now."""
    theirs = os.open(path, FLAGS)
    os.dup2(theirs, fd)
    os.close(theirs)


def test_a_file_that_got_the_number_is_not_ours_and_stays_open(tmp_path: Path) -> None:
    mine = opened(tmp_path / "mine", FLAGS)
    assert mine.is_ours and not mine.is_deleted
    (tmp_path / "mine").unlink()
    assert mine.is_ours and mine.is_deleted
    theirs = mine.fd
    take_over(theirs, tmp_path / "theirs")
    assert not mine.is_ours
    assert not mine.is_deleted
    mine.close()
    os.write(theirs, b"still open")
    os.close(theirs)
    assert not mine.is_ours, "a number that nobody has is not ours either"


def test_spool_whose_numbers_are_a_scripts_goes_on_in_own_files(tmp_path: Path) -> None:
    from agent.delivery.test_spool import crash, drain, header, rows, steps_of

    spool = Spool(tmp_path / "s", header())
    assert spool.append(*tick_of(rows(0)), now=0.0)
    links = {int(link.name): link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    numbers = [fd for fd, link in links.items() if (tmp_path / "s") in link.readlink().parents]
    assert len(numbers) >= 3, "lock, state and rows"
    for fd in numbers:
        take_over(fd, tmp_path / str(fd))
    assert spool.append(*tick_of(rows(3)), now=0.0)
    frame = spool.next()
    assert frame is not None
    assert steps_of(frame) == [*range(6)]
    assert spool.write_state()
    crash(spool)
    for fd in numbers:
        os.write(fd, b"a checkpoint")
        assert (tmp_path / str(fd)).read_bytes() == b"a checkpoint"
        os.close(fd)
    again = Spool.open(tmp_path / "s")
    assert steps_of(*drain(again)) == [*range(6)]
