"""Media that a script logs: `perfagent.Image`, `Audio`, `Table` and `Histogram`.

None of them raises for what it is given: a wrong shape after ten hours of training must not end it. The reason is kept in
`problem`, and log() says it. Each takes the arguments of W&B and trackio as well: those that it has no use for (`boxes`,
`masks`, `log_mode`) are left out, and log() says which.
"""

from __future__ import annotations

import copy
import io
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from perfagent.boundary import guard
from perfagent.device import is_tensor
from perfagent.media.encoding import fitting_png, pixels, wav
from perfagent.media.snapshot import RefusedError, Snapshot, numpy, viewed
from perfagent.redaction import redacted
from perfagent.wire import media as limits
from perfagent.wire.media import MAX_BINS, MAX_MEDIA_BYTES, MAX_TABLE_COLUMNS, MAX_TABLE_ROWS, MediaKind, media_type

if TYPE_CHECKING:
    from perfagent.media.snapshot import Array, View

__all__ = ["Audio", "Histogram", "Image", "Media", "Table"]

_COPIED_BYTES = 16 * 2**20
"""Most bytes to copy of one item: a larger image gets fewer pixels."""
_LOOKED_AT = 2**20
"""Numbers of a histogram; of more, evenly spaced ones."""
_MOST_IMAGES = 64
_MOST_CHANNELS = 8
_CELL_CHARACTERS = 500
Cell = str | int | float | bool | None
_ALLOWED = {"image": "PNG, JPEG, WebP or GIF", "audio": "WAV, MP3 or OGG"}


class Media:
    """problem: why it cannot be sent, empty where all is well. left_out: names of arguments that were given and do
    nothing."""

    kind: ClassVar[MediaKind]

    def __init__(self, data: Any, caption: object, foreign: dict[str, Any]) -> None:
        for name in ("data_or_path", "value", "sequence"):  # as W&B and trackio call the data
            data = foreign.pop(name, data) if data is None else data
        self.left_out = tuple(foreign)
        self.caption = "" if caption is None else str(caption)[: limits.MAX_CAPTION_CHARACTERS]
        self.problem = ""
        self._content: Snapshot | bytes = b""
        self._make(self._take, data)

    def _make(self, take: Callable[[Any], Snapshot | bytes], data: Any) -> None:
        try:
            self._content = take(data)
        except RefusedError as error:
            self.problem = f"perfagent.{type(self).__name__} {error}"
        except Exception as error:
            if guard.by_signal(error):
                raise
            self.problem = f"perfagent.{type(self).__name__} cannot be made of this: {type(error).__name__}: {error}"

    @property
    def nbytes(self) -> int:
        """What it holds in memory."""
        return len(self._content) if isinstance(self._content, bytes) else self._content.nbytes

    def frozen(self) -> Media:
        """As it is now, for what a script may add to later."""
        return self

    def ready(self) -> bool:
        return isinstance(self._content, bytes) or self._content.ready()

    def encoded(self) -> bytes:
        """On the sender's thread, once it is ready. Raises RefusedError for what cannot be sent."""
        return self._content if isinstance(self._content, bytes) else self._encode(self._content.array())

    def _take(self, data: Any) -> Snapshot | bytes:
        raise NotImplementedError

    def _encode(self, array: Array) -> bytes:
        raise NotImplementedError


class Image(Media):
    """An image, or a batch of at most 64 images that is shown as a grid, for `log({"name": perfagent.Image(...)})`.

    Args:
        data: An array or tensor (height × width, with 1, 3 or 4 channels first or last, a batch before it): integers
            from 0 to 255 or floats from 0 to 1. Or a Pillow image, a matplotlib figure, or the bytes or the path of a
            PNG, JPEG, WebP or GIF file of at most 2 MiB.
        caption: Text below the image.
        **foreign: Arguments of other trackers. They are left out, with a message.
    """

    kind = "image"

    def __init__(self, data: Any = None, caption: str | None = None, **foreign: Any) -> None:
        super().__init__(data, caption, foreign)

    def _take(self, data: Any) -> Snapshot | bytes:
        if (file := _file("image", data)) is not None:
            return file
        if hasattr(data, "savefig"):  # here: a figure belongs to the thread that draws it
            drawn = io.BytesIO()
            data.savefig(drawn, format="png")
            return _checked("image", drawn.getvalue())
        if hasattr(data, "getbands") and hasattr(data, "convert"):  # Pillow's
            bands = "RGBA" if data.mode in ("P", "PA", "LA", "RGBA") else "L" if data.mode in ("1", "L") else "RGB"
            data = numpy().asarray(data.convert(bands))
        view = _channels_last(viewed(data))
        step = math.ceil(math.sqrt(max(1, view.nbytes / _COPIED_BYTES)))
        view = view[..., ::step, ::step, :]
        if not 0 < view.nbytes <= 4 * _COPIED_BYTES:
            raise RefusedError(f"takes no image of shape {tuple(data.shape)}")
        return Snapshot(view)

    def _encode(self, array: Array) -> bytes:
        return fitting_png(pixels(array))


def _channels_last(view: View) -> View:
    """(..., height, width, channels). Where both ends may be the channels, those of a tensor come first."""
    shape = tuple(view.shape)
    if len(shape) == 2:
        return view[..., None]
    first, last = (len(shape) in (3, 4) and shape[at] in (1, 3, 4) for at in (-3, -1))
    if not (first or last):
        raise RefusedError(
            f"takes height × width, with 1, 3 or 4 channels first or last, or a batch of such, not the shape {shape}"
        )
    if len(shape) == 4 and shape[0] > _MOST_IMAGES:
        raise RefusedError(f"takes a batch of up to {_MOST_IMAGES} images, not {shape[0]}: log batch[:{_MOST_IMAGES}]")
    if last and not (first and is_tensor(view)):
        return view
    order = (*range(len(shape) - 3), -2, -1, -3)
    return view.permute(order) if is_tensor(view) else numpy().transpose(view, order)


class Audio(Media):
    """A sound, for `log({"name": perfagent.Audio(...)})`.

    Args:
        data: An array or tensor (frames, or frames × channels, at most 8 channels): floats from -1 to 1 or 16-bit
            integers. Or the bytes or the path of a WAV, MP3 or OGG file of at most 2 MiB.
        sample_rate_hz: Samples per second, such as 16000. A file has its own.
        caption: Text below the player.
        **foreign: Arguments of other trackers: `sample_rate` counts as `sample_rate_hz`, others are left out.
    """

    kind = "audio"

    def __init__(
        self, data: Any = None, sample_rate_hz: int | None = None, caption: str | None = None, **foreign: Any
    ) -> None:
        rate = foreign.pop("sample_rate", None)  # as W&B and trackio call it
        self._sample_rate_hz = rate if sample_rate_hz is None else sample_rate_hz
        super().__init__(data, caption, foreign)

    def _take(self, data: Any) -> Snapshot | bytes:
        if (file := _file("audio", data)) is not None:
            return file
        rate = self._sample_rate_hz
        if not isinstance(rate, int) or not 0 < rate <= 768_000:
            raise RefusedError(f"of samples needs sample_rate_hz, such as 16000, not {rate!r:.40}")
        view = viewed(data)
        if view.ndim == 1:
            view = view[:, None]
        if view.ndim == 2 and view.shape[0] < view.shape[1]:
            view = view.T
        if view.ndim != 2 or not 0 < view.shape[1] <= _MOST_CHANNELS:
            raise RefusedError(f"takes frames × up to {_MOST_CHANNELS} channels, not the shape {tuple(data.shape)}")
        most = (MAX_MEDIA_BYTES - 44) // (2 * view.shape[1])
        if view.shape[0] > most:
            self.caption = f"{self.caption} (the first {most / rate:.1f} of {view.shape[0] / rate:.1f} s)".strip()
        return Snapshot(view[:most])

    def _encode(self, array: Array) -> bytes:
        return wav(array, self._sample_rate_hz or 0)


class Table(Media):
    """A table of text and numbers, for `log({"name": perfagent.Table(...)})`.

    The first 1,000 rows are kept, and the number of all rows.

    Args:
        columns: The names of the columns.
        rows: One sequence of cells for each row. `add_data` adds more.
        caption: Text below the table.
        data: W&B's name for `rows`.
        dataframe: A pandas DataFrame, instead of columns and rows.
        **foreign: Arguments of other trackers. They are left out, with a message.
    """

    kind = "table"

    def __init__(
        self,
        columns: Sequence[str] | None = None,
        rows: Iterable[Sequence[Any]] = (),
        caption: str | None = None,
        *,
        data: Any = None,
        dataframe: Any = None,
        **foreign: Any,
    ) -> None:
        self.columns: Sequence[str] = ("Input", "Output", "Expected") if columns is None else columns  # as in W&B
        self.data: list[list[Cell]] = []
        """The rows that are kept."""
        self._count = 0
        data = rows if data is None else data
        super().__init__(data if dataframe is None else dataframe, caption, foreign)

    def _take(self, data: Any) -> bytes:
        if hasattr(data, "itertuples"):
            self.columns, data = [*data.columns], data.itertuples(index=False, name=None)
        if isinstance(self.columns, str) or not 0 < len(self.columns) <= MAX_TABLE_COLUMNS:
            raise RefusedError(f"takes a list of 1 to {MAX_TABLE_COLUMNS} names as columns, not {self.columns!r:.60}")
        self.columns = [str(name)[:_CELL_CHARACTERS] for name in self.columns]
        for row in data:
            self._add(row)
        return b""

    def add_data(self, *cells: Any) -> None:
        """Adds a row, one argument for each column. A table that was logged before does not change."""
        self._make(self._add, cells)

    def _add(self, row: Iterable[Any]) -> bytes:
        self._count += 1
        if len(self.data) < MAX_TABLE_ROWS:
            cells = [_cell(cell) for cell in row]
            if len(cells) != len(self.columns):
                raise RefusedError(f"has {len(self.columns)} columns, and a row of {len(cells)} cells")
            self.data.append(cells)
        return b""

    def add_column(self, name: str, data: Sequence[Any], **_: Any) -> None:
        """Adds a column with one cell for each row. A table that was logged before does not change."""
        if not self.columns:
            self.problem, self._count, self.data = "", len(data), [[] for _ in data[:MAX_TABLE_ROWS]]
        if len(data) != self._count or len(self.columns) >= MAX_TABLE_COLUMNS:
            most = f"{self._count} rows and up to {MAX_TABLE_COLUMNS} columns"
            self.problem = f"perfagent.Table has {most}, and a column of {len(data)} cells"
            return
        self.columns = [*self.columns, str(name)[:_CELL_CHARACTERS]]
        self.data = [[*row, _cell(cell)] for row, cell in zip(self.data, data, strict=False)]

    def get_column(self, name: str, convert_to: str | None = None) -> Any:
        """The cells of a column, of the rows that are kept.

        Args:
            name: The name of the column.
            convert_to: "numpy" for an array instead of a list.

        Raises:
            ValueError: There is no such column.
        """
        cells = [row[[*self.columns].index(name)] for row in self.data]
        return numpy().array(cells) if convert_to == "numpy" else cells

    def frozen(self) -> Media:
        frozen = copy.copy(self)
        frozen.data = [*self.data]
        return frozen

    def encoded(self) -> bytes:
        """Without secrets: what its columns are called, and what its cells look like, tells of them."""
        columns = [next(iter(redacted({name: [*cells]}).values())) for name, *cells in zip(self.columns, *self.data)]  # noqa: B905
        rows = [[cells if isinstance(cells, str) else cells[at] for cells in columns] for at in range(len(self.data))]
        content = {"columns": self.columns, "rows": rows, "count": self._count}
        while len(data := msgspec.json.encode(content)) > MAX_MEDIA_BYTES:
            content["rows"] = rows = rows[: len(rows) // 2]
        return data


class Histogram(Media):
    """The distribution of numbers, such as the weights of a layer, for `log({"name": perfagent.Histogram(...)})`.

    Of more than 2**20 numbers, evenly spaced ones are counted.

    Args:
        values: An array or tensor of any shape. NaN and Inf are counted apart.
        bins: The number of bins.
        caption: Text below the chart.
        **foreign: Arguments of other trackers: `num_bins` counts as `bins`, others are left out, with a message.
    """

    kind = "histogram"

    def __init__(self, values: Any = None, bins: int = 64, caption: str | None = None, **foreign: Any) -> None:
        num_bins = foreign.pop("num_bins", None)  # as W&B calls them
        self._bins = bins if num_bins is None else num_bins
        super().__init__(values, caption, foreign)

    def _take(self, data: Any) -> Snapshot:
        if not isinstance(self._bins, int) or not 0 < self._bins <= MAX_BINS:
            raise RefusedError(f"takes 1 to {MAX_BINS} bins, not {self._bins!r:.40}")
        flat = viewed(data).reshape(-1)
        self._count = int(flat.shape[0])
        if not self._count:
            raise RefusedError("takes at least one number")
        return Snapshot(flat[:: math.ceil(self._count / _LOOKED_AT)])

    def _encode(self, array: Array) -> bytes:
        np = numpy()
        finite = array[np.isfinite(array)].astype("float64")
        counts, edges = np.histogram(finite, self._bins) if len(finite) else (np.zeros(self._bins, int), (0.0, 1.0))
        found = {"low": float(edges[0]), "high": float(edges[-1]), "counts": counts.tolist()}
        return msgspec.json.encode(found | {"nonfinite": len(array) - len(finite), "count": self._count})


def _file(kind: MediaKind, data: object) -> bytes | None:
    """The checked bytes of a file; None for what is none. Read now, for it may be another one later."""
    if isinstance(data, (str, os.PathLike)):
        with Path(data).open("rb") as file:
            return _checked(kind, file.read(MAX_MEDIA_BYTES + 1))
    return _checked(kind, bytes(data)) if isinstance(data, (bytes, bytearray, memoryview)) else None


def _checked(kind: MediaKind, data: bytes) -> bytes:
    if len(data) > MAX_MEDIA_BYTES:
        raise RefusedError(f"takes files of up to {MAX_MEDIA_BYTES >> 20} MiB, and this is larger")
    if media_type(kind, data) is None:
        why = ": SVG and HTML can run in the browser of whoever looks" if kind == "image" and b"<" in data[:200] else ""
        raise RefusedError(f"takes {_ALLOWED[kind]}, not bytes that begin with {data[:12]!r}{why}")
    return data


def _cell(value: Any) -> Cell:
    """As it is now. A tensor on a device would have to be waited for: its type stands for it."""
    if value is None or type(value) in (bool, float) or (type(value) is int and abs(value) < 2**63):
        return value  # type: ignore[no-any-return]
    if getattr(value, "ndim", None) == 0 and getattr(getattr(value, "device", None), "type", "cpu") == "cpu":
        item = value.item()
        if type(item) is not type(value):
            return _cell(item)
        if item.dtype.kind == "f":  # np.longdouble, which has no Python type
            return float(item)
    if hasattr(value, "shape") or isinstance(value, Media):
        return f"[{type(value).__name__}]"
    return str(value)[:_CELL_CHARACTERS]
