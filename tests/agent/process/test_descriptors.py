"""A number of ours that became somebody else's is neither written to nor closed."""

from __future__ import annotations

import os
from pathlib import Path

from ticks import tick_of

from perfagent.delivery.spool import Spool
from perfagent.process.descriptors import Descriptor, opened

FLAGS = os.O_RDWR | os.O_CREAT


def in_its_place(descriptor: Descriptor, path: Path) -> int:
    """What a script does that closes every descriptor and opens a file of its own: the number is that file's now."""
    fd = os.open(path, FLAGS)
    os.dup2(fd, descriptor.fd)
    os.close(fd)
    return descriptor.fd


def test_a_file_that_got_the_number_is_not_ours_and_stays_open(tmp_path: Path) -> None:
    mine = opened(tmp_path / "mine", FLAGS)
    assert mine.is_ours and not mine.is_deleted
    (tmp_path / "mine").unlink()
    assert mine.is_ours and mine.is_deleted
    theirs = in_its_place(mine, tmp_path / "theirs")
    assert not mine.is_ours
    assert not mine.is_deleted
    mine.close()
    os.write(theirs, b"still open")
    os.close(theirs)
    assert not mine.is_ours, "a number that nobody has is not ours either"


def test_spool_whose_numbers_are_a_scripts_goes_on_in_own_files(tmp_path: Path) -> None:
    from agent.delivery.test_spool import crash, drain, header, rows, steps_of

    spool = Spool(tmp_path / "s", header())
    assert spool.append(tick_of(rows(0)), now=0.0)
    ours = [spool._lock, spool._state, spool.growing["ticks"].file]
    theirs = [tmp_path / f"theirs{number}" for number in range(3)]
    numbers = [in_its_place(one, path) for one, path in zip(ours, theirs, strict=True) if one is not None]
    assert len(numbers) == 3
    assert spool.append(tick_of(rows(3)), now=0.0)
    frame = spool.next()
    assert frame is not None
    assert steps_of(frame) == [*range(6)]
    in_its_place(spool._state, theirs[1]) if spool._state is not None else None
    assert spool.write_state(), "its state is opened anew, too"
    crash(spool)
    for number, path in zip(numbers, theirs, strict=True):
        os.write(number, b"a checkpoint")
        assert path.read_bytes() == b"a checkpoint"
        os.close(number)
    again = Spool.open(tmp_path / "s")
    assert steps_of(*drain(again)) == [*range(6)]
