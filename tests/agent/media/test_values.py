"""What `perfagent.Image`, `Audio`, `Table` and `Histogram` make of what they are given."""

from __future__ import annotations

import io
import json
import sys
import wave
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

import perfagent
from perfagent.device import read_all_later
from perfagent.media import Media
from perfagent.wire.media import MAX_MEDIA_BYTES
from perfagent_server.event_data import media_type_of

PICTURE = np.random.default_rng(1).integers(0, 256, (12, 20, 3), np.uint8)


def sent(media: Media) -> bytes:
    """Its bytes, of a kind that the server takes."""
    assert media.problem == ""
    data = media.encoded()
    assert media_type_of(media.kind, data) is not None
    return data


def shown(media: Media) -> np.ndarray:
    return np.asarray(Pillow.open(io.BytesIO(sent(media))))


def png(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Pillow.fromarray(picture).save(file, "PNG")
    return file.getvalue()


def test_an_image_is_sent_as_it_was_given() -> None:
    tensor = torch.tensor(PICTURE)
    arrays = (PICTURE, PICTURE.transpose(2, 0, 1), PICTURE / 255.0)
    tensors = (tensor, tensor.permute(2, 0, 1), tensor.permute(2, 0, 1).long())
    for given in (*arrays, *tensors, Pillow.fromarray(PICTURE), png(PICTURE)):
        assert (shown(perfagent.Image(given)) == PICTURE).all()
    # gray, boolean, transparent; and what is no number
    assert (shown(perfagent.Image(PICTURE[..., 0])) == PICTURE[..., 0]).all()
    assert (shown(perfagent.Image(PICTURE[..., 0] > 99)) == 255 * (PICTURE[..., 0] > 99)).all()
    assert shown(perfagent.Image(np.dstack([PICTURE, PICTURE[..., :1]]))).shape == (12, 20, 4)
    assert (shown(perfagent.Image(torch.full((4, 4), float("nan")))) == 0).all()


def test_a_batch_becomes_a_grid() -> None:
    batch = torch.tensor(PICTURE).permute(2, 0, 1).expand(5, 3, 12, 20)
    sheet = shown(perfagent.Image(batch))
    assert sheet.shape == (2 * 12 + 2, 3 * 20 + 2 * 2, 3)
    assert (sheet[14:, 22:42] == PICTURE).all()
    assert "batch[:64]" in perfagent.Image(torch.zeros(65, 3, 4, 4)).problem


@pytest.mark.parametrize("make", [np.ones, torch.ones], ids=["array", "tensor"])
def test_what_changes_in_place_later_is_not_sent(make: object) -> None:
    values = make((8, 8))  # type: ignore[operator]
    image, histogram, rows = perfagent.Image(values), perfagent.Histogram(values), [["before"]]
    table = perfagent.Table(["word"], rows)
    values *= 0
    rows[0][0] = "after"
    assert (shown(image) == 255).all()
    assert json.loads(sent(histogram))["low"] == 0.5
    assert b"before" in sent(table)


SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>'


@pytest.mark.parametrize("given", [SVG, b"<html><script>alert(1)</script>", b"%PDF-1.7", b"", b"\x89PNG" + SVG])
def test_what_could_run_in_a_browser_is_refused_with_a_reason(given: bytes, tmp_path: Path) -> None:
    file = tmp_path / "harmless.png"
    file.write_bytes(given)
    for image in (perfagent.Image(given), perfagent.Image(file), perfagent.Image(str(file))):
        assert "takes PNG, JPEG, WebP or GIF" in image.problem
    assert "takes WAV, MP3 or OGG" in perfagent.Audio(given).problem
    arrays = np.zeros((2, 5, 5)), np.zeros((0, 4, 3)), torch.zeros(3, 4, dtype=torch.complex64)
    assert all(perfagent.Image(none).problem for none in (None, "no-such-file.png", object(), *arrays))


def test_a_large_image_is_made_smaller_until_it_fits() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1500, 1000, 3), np.uint8)
    image = perfagent.Image(noise)
    assert len(sent(image)) <= MAX_MEDIA_BYTES
    assert shown(image).shape == (750, 500, 3)
    assert perfagent.Image(torch.zeros(3, 6000, 6000)).nbytes < 32 * 2**20, "so much is not copied"


def test_a_sound_is_a_wave_file_and_a_long_one_is_cut() -> None:
    with wave.open(io.BytesIO(sent(perfagent.Audio(torch.tensor([[0.0, 1.0, -1.0], [0.5, 2.0, 0.0]]), 8000)))) as file:
        assert file.getparams()[:4] == (2, 2, 8000, 3)
        assert np.frombuffer(file.readframes(3), "<i2").tolist() == [0, 16384, 32767, 32767, -32767, 0]
    long = perfagent.Audio(np.zeros(2_000_000), 16000, caption="rain")
    assert len(sent(long)) <= MAX_MEDIA_BYTES
    assert long.caption == "rain (the first 65.5 of 125.0 s)"
    assert "sample_rate_hz" in perfagent.Audio(np.zeros(9)).problem


def test_a_table_keeps_its_first_rows_and_no_secrets() -> None:
    rows = [[at, "sk-ant-api03-" + "x9Kq" * 20, torch.tensor(0.5), float("nan"), torch.ones(3)] for at in range(1500)]
    told = json.loads(sent(perfagent.Table(["row", "text", "score", "api_key", "vector"], rows)))
    assert told["count"] == 1500
    assert len(told["rows"]) == 1000
    assert told["rows"][7] == [7, "[redacted]", 0.5, "[redacted]", "[Tensor]"]
    assert "a row of 1 cells" in perfagent.Table(["a", "b"], [[1]]).problem


def test_numbers_that_python_has_no_type_for_are_cells() -> None:
    table = perfagent.Table(["real", "array", "complex"], [[np.longdouble(1.5), np.array(0.5, "g"), np.clongdouble(2)]])
    assert json.loads(sent(table))["rows"] == [[1.5, 0.5, "[clongdouble]"]]


def test_a_histogram_counts_what_is_finite() -> None:
    told = json.loads(sent(perfagent.Histogram(torch.tensor([0.0, 1.0, 1.0, 4.0, float("inf"), float("nan")]), bins=4)))
    assert told == {"low": 0.0, "high": 4.0, "counts": [1, 2, 0, 1], "nonfinite": 2, "count": 6}
    many = perfagent.Histogram(np.zeros(3_000_000, np.float32))
    assert many.nbytes <= 4 * 2**20
    assert json.loads(sent(many))["count"] == 3_000_000


def test_an_image_is_taken_while_another_thread_imports_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert (shown(perfagent.Image(PICTURE)) == PICTURE).all()
    values = {"loss": np.float32(0.5)}
    read_all_later(values)
    assert values == {"loss": np.float32(0.5)}
    with pytest.raises(perfagent.ConfigError, match=r"attach\(\) takes a torch.nn.Module"):
        perfagent.attach(object())


def test_rows_and_columns_are_added_to_a_table_that_was_logged() -> None:
    table = perfagent.Table(columns=[], data=[])
    assert "1 to" in table.problem
    table.add_column("a", [1, 2])
    table.add_column("b", np.array([0.5, 1.5]))
    assert (table.problem, table.columns, table.get_column("b")) == ("", ["a", "b"], [0.5, 1.5])
    logged = table.frozen()
    table.add_data(3, 2.5)
    assert json.loads(sent(table.frozen()))["rows"] == [[1, 0.5], [2, 1.5], [3, 2.5]]
    table.add_column("c", [1])
    assert "3 rows" in table.problem and "a column of 1 cells" in table.problem
    assert json.loads(sent(logged))["rows"] == [[1, 0.5], [2, 1.5]]
    table.add_data(1)
    assert "a row of 1 cells" in table.problem
