"""Runs and series as data frames of pandas and polars."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from api_builders import Listening, frame, listening

from perfagent.errors import ConfigError, ResourceError
from perfagent_client import ApiError, AsyncClient, Client
from perfagent_client.data_frame import Library

pytestmark = pytest.mark.real

VALUES = [0.1, 5e-324, -0.0, 1.7976931348623157e308, math.inf, -math.inf, math.nan]
LIBRARIES = ("pandas", "polars")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    with listening(tmp_path_factory.mktemp("frames")) as running:
        running.take(frame({"loss": VALUES, "lr": [0.5] * 7}, run="a", name="first", first_step=2**32))
        running.take(
            frame({"loss": [1.0]}, run="b", name="second"), frame({"loss": [2.0]}, run="b", name="second", rank=1)
        )
        yield running


def bits(values: Any) -> list[bytes]:
    return [struct.pack("<d", value) for value in values]


@pytest.mark.parametrize("library", LIBRARIES)
def test_frame_has_every_sample_to_the_bit(server: Listening, library: Library) -> None:
    pytest.importorskip(library)
    with Client(server.url) as client:
        found = client.frame("first", "loss", library=library)
        assert list(found.columns) == ["run", "run_name", "name", "rank", "step", "time", "value"]
        assert bits(found["value"]) == bits(VALUES)
        assert list(found["step"]) == list(range(2**32, 2**32 + 7))
        assert [str(found[name].dtype).lower() for name in ("rank", "step", "value")] == ["int64", "int64", "float64"]
        export = next(iter(client.export("a")))
        moment = found["time"][0]
        assert (
            abs(moment - datetime.fromtimestamp(export.time, UTC)).total_seconds() < 1e-6 and moment.tzinfo is not None
        )

        both = client.frame(["a", "second"], library=library)
        rows = set(zip(both["run"], both["run_name"], both["name"], both["rank"], strict=True))
        assert rows == {
            ("a", "first", "loss", 0),
            ("a", "first", "lr", 0),
            ("b", "second", "loss", 0),
            ("b", "second", "loss", 1),
        }

        async def read() -> Any:
            async with AsyncClient(server.url) as reading:
                return await reading.frame(["a", "second"], library=library)

        assert both.equals(asyncio.run(read()))


@pytest.mark.parametrize("library", LIBRARIES)
def test_series_is_a_frame_of_its_buckets(server: Listening, library: Library) -> None:
    pytest.importorskip(library)
    with Client(server.url) as client:
        series = client.series("a", "loss")
    found = series.to_frame(library)
    assert list(found.columns) == ["step", "time", "mean", "min", "max", "count", "nonfinite"]
    assert bits(found["mean"]) == bits(series.mean) and list(found["nonfinite"]) == series.nonfinite
    assert len(type(series)(name="x", rank=0, unit="", exact=True, step=[], min=[], max=[], mean=[], count=[], nonfinite=[])
               .to_frame(library)) == 0  # fmt: skip


def test_wrong_names_and_a_missing_library_are_told(server: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(server.url) as client:
        with pytest.raises(ApiError, match="no series 'los'; did you mean 'loss'"):
            client.frame(["a", "b"], ["loss", "los"])
        with pytest.raises(ApiError, match="no run"):
            client.frame("nothing")
        with pytest.raises(ConfigError, match="allowed are 'pandas' and 'polars'"):
            client.frame("b", library="arrow")  # type: ignore[arg-type]
        monkeypatch.setattr("perfagent_client.data_frame.find_spec", lambda name: None)
        with pytest.raises(ResourceError, match="needs pandas or polars, which is not installed: `pip install pandas`"):
            client.frame("b")
        with pytest.raises(ResourceError, match="needs polars"):
            client.series("b", "loss").to_frame("polars")
