"""The text and the notebook form of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from perfagent.wire import Finding, Series

__all__ = ["Shown"]


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
        where = "" if self.place is None else f" at {self.place}" if _is_address(self.place) else f", {self.place}"
        name = f" {self.name!r}" if self.name else ""
        return f"<perfagent run{name}: {', '.join(self._facts())}{where}>"

    def html(self, verdict: Finding | None = None, losses: Series | None = None) -> str:
        """verdict, losses: what the server has of it."""
        from perfagent.wire.notebook_html import card, curves_html, link  # not with the training: a notebook has it

        facts = self._facts()
        if self.place is not None and not _is_address(self.place):
            facts.append(self.place)
        curve = curves_html("Loss", [losses]) if losses is not None else ""
        said = verdict._repr_html_() if verdict is not None else ""
        return card(f"perfagent run {link(self.name, self.place)}", facts, said, curve)

    def _facts(self) -> list[str]:
        facts = [self.state]
        if self.step is not None:
            facts.append(f"step {self.step}")
        if self.loss is not None:
            step, loss = self.loss
            facts.append(f"loss {loss:.6g}" + (f" (step {step})" if step != self.step else ""))
        return facts


def _is_address(place: str) -> bool:
    return place.startswith(("http://", "https://"))
