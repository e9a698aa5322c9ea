"""Words that people read, approved in one file: `assert message == words`. After a change of words: pytest --snapshot-update."""

from __future__ import annotations

from pathlib import Path

from syrupy.data import Snapshot
from syrupy.extensions.amber import AmberDataSerializer, AmberSnapshotExtension
from syrupy.location import PyTestLocation
from syrupy.types import SnapshotIndex

__all__ = ["WORDS", "ApprovedWords"]

TESTS = Path(__file__).parent
WORDS = TESTS / "words.ambr"


class _ByFile(AmberDataSerializer):
    @classmethod
    def snapshot_sort_key(cls, snapshot: Snapshot, name_order: dict[str, int] | None = None) -> tuple[str, str]:
        test, _, file = snapshot.name.rpartition(" in ")
        return file, test


class ApprovedWords(AmberSnapshotExtension):
    """The words of all tests in tests/words.ambr, each named by its test and file."""

    serializer_class = _ByFile

    @classmethod
    def get_location(cls, *, test_location: PyTestLocation, index: SnapshotIndex) -> str:
        return str(WORDS)

    @classmethod
    def matches_test_location(cls, *, test_location: PyTestLocation, snapshot_location: str) -> bool:
        return True

    @classmethod
    def get_snapshot_name(cls, *, test_location: PyTestLocation, index: SnapshotIndex = 0) -> str:
        name = super().get_snapshot_name(test_location=test_location, index=index)
        return f"{name} in {Path(test_location.filepath).relative_to(TESTS)}"
