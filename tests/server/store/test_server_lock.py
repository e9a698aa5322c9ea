"""Two servers on one database would judge every run twice, and each would believe its own caches."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from perfagent.endpoint.local_server import ADDRESS_FILE
from perfagent.errors import ResourceError
from perfagent_server.commands.server_lock import only_server
from perfagent_server.settings import Settings


def at(folder: Path, database: Path | None = None) -> Settings:
    return Settings(data=folder, database=None if database is None else f"sqlite:///{database}")


def refused(settings: Settings) -> str:
    with pytest.raises(ResourceError) as error, only_server(settings):
        pass
    return str(error.value)


def test_a_second_server_on_one_database_is_refused(tmp_path: Path) -> None:
    """Whatever its data folder, and by whatever name."""
    shared, (a, b) = tmp_path / "shared" / "runs.db", (tmp_path / "a", tmp_path / "b")
    (tmp_path / "link").symlink_to(tmp_path)
    with only_server(at(a, shared)):
        assert {stat.S_IMODE(file.stat().st_mode) for file in a.iterdir()} == {0o600}
        (a / ADDRESS_FILE).write_text("http://127.0.0.1:8420\n")
        said = refused(at(b, shared))
        for part in (str(shared), str(a), f"process {os.getpid()}", "http://127.0.0.1:8420", "--database"):
            assert part in said
        refused(at(b, tmp_path / "link" / "shared" / "runs.db"))
        with only_server(at(b)):
            pass  # another database is fine
    with only_server(at(b, shared)):
        pass  # the lock ended with its holder
