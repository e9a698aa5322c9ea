"""Two commits side by side: how many mutants of each room their tests kill, and which one kills that the other does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mutants.rooms import ROOMS
from mutants.running import Result

__all__ = ["report"]

_HEADS = ("room", "mutants", "killed", "killed", "score", "score", "gone")


def report(before: Mapping[str, Result], now: Mapping[str, Result], names: tuple[str, str]) -> str:
    """before, now: results by the id of the mutant. Those whose line is gone count in neither; those that are not killed
    before and were not tried now count as not killed."""
    rows: list[Sequence[object]] = [("", "", names[0], names[1], names[0], names[1], ""), _HEADS]
    for room in [*ROOMS, "all"]:
        of_room = [one for one in before.values() if room in {one.room, "all"}]
        there = [one for one in of_room if one.id not in now or now[one.id].ended != "gone"]
        if there:
            killed = sum(one.killed for one in there), sum(one.id in now and now[one.id].killed for one in there)
            scores = [f"{100 * number / len(there):.0f}%" for number in killed]
            rows.append((room, len(there), *killed, *scores, len(of_room) - len(there)))
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    lines = ["  ".join(str(cell).rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lost = [
        one
        for one in before.values()
        if one.killed and one.id in now and now[one.id].ended in {"survived", "untouched"}
    ]
    won = sum(not one.killed and one.id in now and now[one.id].killed for one in before.values())
    missing = sum(one.killed and one.id not in now for one in before.values())
    lines += ["", f"killed before and not now: {len(lost)}; now and not before: {won}"]
    lines += [f"killed before and not tried now: {missing}"] if missing else []
    for one in lost:
        after = now[one.id]
        lines += [
            f"- {after.file}:{after.line} {one.function}, {one.operator} ({one.nth}), mutant {one.id}: {after.ended} now",
            f"  `{one.text}`",
            f"  killed by {one.by}",
        ]
    return "\n".join(lines)
