"""Two commits side by side: how many mutants of each room their tests kill, and which one kills that the other does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mutants.rooms import ROOMS
from mutants.running import Result

__all__ = ["report"]

_HEADS = ("room", "mutants", "killed", "killed", "score", "score", "gone")


def report(before: Mapping[str, Result], now: Mapping[str, Result], names: tuple[str, str]) -> str:
    """before, now: results by the id of the mutant. Only mutants of both count; `gone` is those without their line now."""
    rows: list[Sequence[object]] = [("", "", names[0], names[1], names[0], names[1], ""), _HEADS]
    for room in [*ROOMS, "all"]:
        of_room = [one for one in before.values() if room in {one.room, "all"}]
        both = [one for one in of_room if one.id in now]
        if of_room:
            killed = sum(one.killed for one in both), sum(now[one.id].killed for one in both)
            scores = [f"{100 * number / len(both):.0f}%" if both else "" for number in killed]
            rows.append((room, len(both), *killed, *scores, len(of_room) - len(both)))
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    lines = ["  ".join(str(cell).rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lost = [one for one in before.values() if one.killed and one.id in now and not now[one.id].killed]
    won = sum(not one.killed and one.id in now and now[one.id].killed for one in before.values())
    lines += ["", f"killed before and not now: {len(lost)}; now and not before: {won}"]
    for one in lost:
        after = now[one.id]
        lines += [
            f"- {after.file}:{after.line} {one.function}, {one.operator} ({one.nth}), mutant {one.id}: {after.ended} now",
            f"  `{one.text}`",
            f"  killed by {one.by}",
        ]
    return "\n".join(lines)
