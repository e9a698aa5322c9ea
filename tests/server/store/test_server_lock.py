"""Two servers on one database would judge every run twice, and each would believe its own caches."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from perfagent.errors import ResourceError
from perfagent.local_server import ADDRESS_FILE
from perfagent_server.commands.server_lock import only_server
from perfagent_server.settings import Settings


def at(folder: Path, database: Path | None = None) -> Settings:
    return Settings(data=folder, database=None if database is None else f"sqlite:///{database}")


def refused(settings: Settings) -> str:
    with pytest.raises(ResourceError) as error, only_server(settings):
        pass
    return str(error.value)


def test_a_second_server_on_the_same_database_is_refused_whatever_its_data_folder(tmp_path: Path) -> None:
    shared = tmp_path / "shared" / "runs.db"
    with only_server(at(tmp_path / "a", shared)):
        (tmp_path / "a" / ADDRESS_FILE).write_text("http://127.0.0.1:8420\n")
        said = refused(at(tmp_path / "b", shared))
        with only_server(at(tmp_path / "b")):
            pass  # another database is fine
    for part in (str(shared), str(tmp_path / "a"), f"process {os.getpid()}", "http://127.0.0.1:8420", "--database"):
        assert part in said
    with only_server(at(tmp_path / "b", shared)):
        pass  # the lock ended with its holder


def test_another_name_of_the_same_file_is_the_same_database(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with only_server(at(tmp_path / "a", tmp_path / "runs.db")):
        refused(at(tmp_path / "b", tmp_path / "link" / "runs.db"))


def test_a_server_whose_database_is_in_the_data_folder_of_another_is_refused(tmp_path: Path) -> None:
    with only_server(at(tmp_path / "a")):
        assert "perfagent.db" in refused(at(tmp_path / "b", tmp_path / "a" / "perfagent.db"))
        assert str(tmp_path / "a") in refused(at(tmp_path / "a", tmp_path / "other.db"))


def test_the_lock_is_private(tmp_path: Path) -> None:
    with only_server(at(tmp_path / "a")):
        assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "a").iterdir()} == {0o600}
