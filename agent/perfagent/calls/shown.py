"""The text and the notebook form of a run, which a notebook updates while later cells run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from perfagent.wire import Finding, Series

__all__ = ["Shown", "show_live"]

_AFTER_END = 2
"""Rounds: the server judges the last steps when it has heard of the end."""


class Shown(NamedTuple):
    """A run at this moment.

    name: empty on a rank that has not learned it yet; step: the last that is over, None before the first; loss: step
    and value of the newest that is known; place: the address of its page or, in words, where else it goes.
    """

    name: str
    state: str
    step: int | None
    loss: tuple[int, float] | None
    place: str | None

    def text(self) -> str:
        at = " at" if self._has_page else ","
        name = f" {self.name!r}" if self.name else ""
        return f"<perfagent run{name}: {', '.join(self._facts())}{f'{at} {self.place}' if self.place else ''}>"

    def html(self, verdict: Finding | None = None, losses: Series | None = None) -> str:
        """verdict, losses: what the server has of it."""
        from perfagent.wire.notebook_html import card, curves_html, link  # not with the training: a notebook has it

        facts = self._facts() + ([self.place] if self.place and not self._has_page else [])
        curve = curves_html("Loss", [losses]) if losses is not None else ""
        said = verdict._repr_html_() if verdict is not None else ""
        return card(f"perfagent run {link(self.name, self.place)}", facts, said, curve)

    @property
    def _has_page(self) -> bool:
        return (self.place or "").startswith(("http://", "https://"))

    def _facts(self) -> list[str]:
        facts = [self.state] + ([f"step {self.step}"] if self.step is not None else [])
        if self.loss is not None:
            step, loss = self.loss
            facts.append(f"loss {loss:.6g}" + (f" (step {step})" if step != self.step else ""))
        return facts


def show_live(shown: object, has_ended: Callable[[], bool], every_s: float) -> None:
    """Returns at once. The output of this cell is drawn again every `every_s` seconds, until just after the end. shown: has
    `_repr_html_`; outside of a notebook it is printed, once."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        print(shown)  # noqa: T201 - what was asked for
        return
    handle = display(shown, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]
    if get_ipython() is None or handle is None:
        return
    main = threading.main_thread()

    def follow() -> None:
        rounds_after_end = 0
        while rounds_after_end < _AFTER_END and main.is_alive():
            time.sleep(every_s)
            rounds_after_end += has_ended()
            handle.update(shown)

    threading.Thread(target=follow, name="perfagent-notebook", daemon=True).start()
