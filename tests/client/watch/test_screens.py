"""Pictures of the screens at three widths, as text. Write them anew with PERFAGENT_TEST_WRITE=1 and look at each in a browser."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from builders import ServerProcess

PICTURES = Path(__file__).parents[2] / "data" / "watch"


def picture(svg: str) -> str:
    """Without what differs each time or says nothing of the screen: ids, fonts, the window's frame."""
    svg = re.sub(r"terminal-\d+", "t", svg)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip()) + "\n"


@pytest.mark.parametrize(("columns", "rows"), [(60, 20), (80, 24), (140, 30)])
def test_the_screens_look_as_they_did(opened: Callable[..., Any], site: ServerProcess, columns: int, rows: int) -> None:
    """It is 90 s after the last that was heard of a run."""

    async def look() -> dict[str, str]:
        heard = max(datetime.fromisoformat(run["updated"]).timestamp() for run in site.get("/runs")["runs"])
        async with opened(columns=columns, rows=rows, clock=lambda: heard + 90) as seen:
            wide = ("38,736 tokens/s", "38,780 tokens/s", "NaN  █", "1.5  ▁", "1.557  █") if columns > 130 else ()
            await seen.shows("live", "ill run", *wide)
            pictures = {"fleet": picture(seen.app.export_screenshot())}
            await seen.pilot.press("enter")
            await seen.shows("live", "✕ critical", "nonfinite_loss")
            return pictures | {"run": picture(seen.app.export_screenshot())}

    for name, drawn in asyncio.run(look()).items():
        file = PICTURES / f"{name}-{columns}.svg"
        if os.environ.get("PERFAGENT_TEST_WRITE"):
            file.write_text(drawn, "utf-8")
        assert drawn == file.read_text("utf-8"), f"{file.name} has changed; see the docstring of this file"
