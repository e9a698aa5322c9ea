"""Datasets in mapped files: tokens and lines."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from perfagent.errors import ConfigError
from perfagent_loop.data.mapped import MappedLines, MappedTokens, map_tokens

DOCUMENTS = [[1, 2, 3], [], [65_535], [*range(100)]]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int32, torch.int64])
def test_documents_come_back_from_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    written = map_tokens(tmp_path / "t.bin", [torch.arange(300)[1:4], *DOCUMENTS[1:]], dtype=dtype)
    for dataset in (written, MappedTokens(tmp_path / "t.bin"), pickle.loads(pickle.dumps(written))):
        assert len(dataset) == 4
        assert [dataset[index].tolist() for index in (0, 1, 2, -1)] == DOCUMENTS
        assert dataset[0].dtype is dtype
        assert dataset.lengths == [3, 0, 1, 100]
        assert dataset.tokens.tolist() == [token for document in DOCUMENTS for token in document]
        dataset.verify()
    with pytest.raises(IndexError):
        written[4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.bin"]
    written[0].zero_()
    assert (written[0].tolist(), MappedTokens(tmp_path / "t.bin")[0].tolist()) == ([0, 0, 0], [1, 2, 3])


def test_damage_of_any_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    map_tokens(path, DOCUMENTS, dtype=torch.uint16)
    content = path.read_bytes()
    for place in [*range(0, 48, 5), *range(64, len(content), 7)]:  # between the head and the tokens nothing is read
        changed = bytearray(content)
        changed[place] ^= 4
        path.write_bytes(changed)
        with pytest.raises(ConfigError, match=r"damaged|no file of tokens|cut short"):
            MappedTokens(path).verify()
    for cut in (0, 10, 63, 64, 100, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.raises(ConfigError, match=r"cut short|no file of tokens|damaged"):
            MappedTokens(path)


def test_an_error_leaves_neither_a_draft_nor_half_a_file(tmp_path: Path) -> None:
    def documents() -> Any:
        yield [1]
        yield [70_000]

    with pytest.raises(ConfigError, match="document 1"):
        map_tokens(tmp_path / "t.bin", documents(), dtype=torch.uint16)
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(ConfigError, match="cannot hold"):
        map_tokens(tmp_path / "t.bin", [], dtype=torch.float32)
    with pytest.raises(ConfigError, match="cannot be mapped"):
        MappedTokens(tmp_path / "absent")


def test_lines_come_back_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"n": number, "text": "ä" * number} for number in range(20)]
    for end in ("", "\n\n\n"):
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + end, "utf-8")
        for dataset in (MappedLines(path), MappedLines(path), pickle.loads(pickle.dumps(MappedLines(path)))):
            assert len(dataset) == 20
            assert [dataset[index] for index in (3, -1, 0)] == [rows[3], rows[19], rows[0]]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.lines"]
    for text, lines in ((b"one\r\n\r\nthree", ["one", "", "three"]), (b"", [])):
        (tmp_path / "a.txt").write_bytes(text)
        assert [*MappedLines(tmp_path / "a.txt", bytes.decode)] == lines


def test_an_old_or_damaged_index_is_made_anew_if_it_can_be(tmp_path: Path) -> None:
    path, index = tmp_path / "a.txt", tmp_path / "a.txt.lines"
    path.write_bytes(b"a\nb\n")
    assert len(MappedLines(path, bytes.decode)) == 2
    path.write_bytes(b"a\nb\nc\n")
    assert len(MappedLines(path, bytes.decode)) == 3
    content = index.read_bytes()
    for place in range(0, len(content), 5):
        changed = bytearray(content)
        changed[place] ^= 1
        index.write_bytes(changed)
        assert [MappedLines(path, bytes.decode)[number] for number in range(3)] == ["a", "b", "c"]
    for cut in range(0, len(content), 5):
        index.write_bytes(content[:cut])
        assert MappedLines(path, bytes.decode)[2] == "c"
    index.unlink()
    without = MappedLines(path, bytes.decode, index=tmp_path / "absent" / "index")  # no place for it
    assert (len(without), without[1]) == (3, "b")
    assert [one.name for one in tmp_path.iterdir()] == ["a.txt"]
