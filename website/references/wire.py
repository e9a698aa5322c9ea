"""docs/reference/wire.md: tables of the fields of frames, groups and events. The rest of the page is written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import NODEFAULT, Struct, inspect

from perfagent.wire import EVENT_KINDS, Event, Frame, Group
from perfagent_server.event_data import EVENT_DATA
from references.markdown import filled, linked, meanings, table

__all__ = ["wire"]

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "wire.md"
_COLUMNS = ("field", "type", "meaning")
_PLAIN = {
    inspect.IntType: "integer", inspect.FloatType: "number", inspect.StrType: "text", inspect.BoolType: "bool",
    inspect.BytesType: "bytes", inspect.AnyType: "any",
}  # fmt: skip


def wire() -> str:
    """The page."""
    page = _PAGE.read_text("utf-8")
    for part, kind in (("frame", Frame), ("group", Group), ("event", Event)):
        page = filled(page, part, table(_COLUMNS, _rows(inspect.type_info(kind))))
    return filled(page, "kinds", "\n".join(_kind(kind, EVENT_DATA[kind]) for kind in EVENT_KINDS) + "\n")


def _kind(name: str, data: type[Struct]) -> str:
    says = " ".join((data.__doc__ or "").split())
    return f"### `{name}` events\n\n{linked(says)}\n\n{table(_COLUMNS, _nested(inspect.type_info(data), ''))}"


def _nested(struct: inspect.StructType, prefix: str) -> Iterator[tuple[str, str, str]]:
    """The fields of a struct, each followed by those of the struct that it holds."""
    for field, row in zip(struct.fields, _rows(struct, prefix), strict=True):
        yield row
        below, within = _below(field.type)
        if below is not None:
            yield from _nested(below, f"{prefix}{field.encode_name}{within}.")


def _below(kind: inspect.Type) -> tuple[inspect.StructType | None, str]:
    """The struct that a field holds, if any, and how to come to it."""
    match kind:
        case inspect.StructType():
            return kind, ""
        case inspect.Metadata():
            return _below(kind.type)
        case inspect.ListType():
            struct, within = _below(kind.item_type)
            return struct, f"[]{within}"
        case inspect.UnionType():
            return next((found for found in map(_below, kind.types) if found[0] is not None), (None, ""))
    return None, ""


def _rows(struct: inspect.StructType, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """One row a field: bold if it is required; with its default if it may be absent, but not nil."""
    written = meanings(struct.cls)
    for field in struct.fields:
        extra: Any = (field.type.extra_json_schema or {}) if isinstance(field.type, inspect.Metadata) else {}
        name, kind = f"`{prefix}{field.encode_name}`", _words(field.type)
        says = [linked(extra.get("description") or written.get(field.name, ""))]
        default = field.default_factory() if field.default is NODEFAULT and not field.required else field.default
        if not field.required and default is not None:
            says.append(f"default: `{str(default).lower() if isinstance(default, bool) else default}`")
        yield f"**{name}**" if field.required else name, kind, "; ".join(filter(None, says))


def _words(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata():
            return (kind.extra_json_schema or {}).get("title") or _words(kind.type)
        case inspect.UnionType():
            return " or ".join(_words(one) for one in kind.types if not isinstance(one, inspect.NoneType))
        case inspect.ListType():
            item = _words(kind.item_type)
            return f"list of ({item})" if " or " in item else f"list of {item}"
        case inspect.TupleType():
            return f"[{', '.join(map(_words, kind.item_types))}]"
        case inspect.DictType():
            return "map" if isinstance(kind.value_type, inspect.AnyType) else f"map of {_words(kind.value_type)}"
        case inspect.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case inspect.StructType():
            return kind.cls.__name__.lower() if kind.cls in (Group, Event) else "map"
    return _PLAIN[type(kind)]
