"""Shows a run or a comparison in a notebook. The data is requested from the server when the cell runs."""

from __future__ import annotations

import contextlib
from html import escape
from typing import Protocol

from perfagent.command_line.terminal_output import Line
from perfagent.errors import PerfagentError
from perfagent.wire import Finding, Series, metric
from perfagent.wire.loss_names import loss_of
from perfagent.wire.notebook_html import card, curves_html, link, table_html
from perfagent_client.compare.pages import comparison_page
from perfagent_client.models import Comparison, RunDetails
from perfagent_client.polling import ENDED

__all__ = ["LiveRun", "comparison_html", "run_html"]

_POINTS = 120
_MOST_FINDINGS = 3
_STEP_TIME = "step_time_s"


class Reader(Protocol):
    """A client, as far as it is needed here."""

    server: str

    def run(self, run: str) -> RunDetails: ...

    def verdict(self, run: str) -> Finding: ...

    def findings(self, run: str) -> list[Finding]: ...

    def names(self, run: str) -> list[str]: ...

    def series(
        self, run: str, name: str, *, from_step: int | None = None, to_step: int | None = None, points: int = 1000
    ) -> Series: ...


class LiveRun:
    """A run as it is when it is shown."""

    def __init__(self, run: RunDetails, client: Reader) -> None:
        self._run, self._client = run, client

    def __repr__(self) -> str:
        return f"<perfagent run {self._run.name!r}: {self._run.state}, step {self._run.step:,}>"

    def _repr_html_(self) -> str:
        return run_html(self._run, self._client)

    def has_ended(self) -> bool:
        """Asks. A server that is away for a while ends nothing."""
        with contextlib.suppress(PerfagentError):
            self._run = self._client.run(self._run.run)
        return self._run.state in ENDED


def run_html(run: RunDetails, client: Reader) -> str:
    facts = [run.state, f"step {run.step:,}", *([run.reason] if run.reason else [])]
    parts: list[str] = []
    with contextlib.suppress(PerfagentError):  # a card without its curves is still a card
        verdict = client.verdict(run.run)
        parts = [
            _html(verdict),
            *(_html(one) for one in client.findings(run.run)[:_MOST_FINDINGS] if one.rule != verdict.rule),
        ]
        names = client.names(run.run)
        shown = [name for name in (loss_of(names), _STEP_TIME) if name in names]
        parts += [
            curves_html(metric(name).title, [client.series(run.run, name, points=_POINTS)])
            for name in shown
            if name is not None
        ]
    return card(f"perfagent run {link(run.name, f'{client.server}/run/{run.run}')}", facts, *parts)


def _html(finding: Finding) -> str:
    return finding._repr_html_()


def comparison_html(found: Comparison, client: Reader) -> str:
    parts = []
    for part in comparison_page(found):
        if isinstance(part, Line):
            text = escape(part.text)
            parts.append(f"<p>{f'<b>{text}</b>' if part.style.startswith('bold') else text}</p>" if text else "")
        else:
            parts.append(table_html(part.head, part.rows))
    sides, curves = [], []
    with contextlib.suppress(PerfagentError):
        for side in found["sides"]:
            if side["loss"] is not None:
                curves.append(
                    client.series(
                        side["run"], side["loss"], from_step=side["begin"], to_step=side["end"], points=_POINTS
                    )
                )
                sides.append(side["name"])
    return card("perfagent comparison", [], *parts, curves_html("loss", curves, sides))
