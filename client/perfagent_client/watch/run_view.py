"""One run as its screen shows it: the server's answers, and what it has sent since. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perfagent.wire import Alert, Finding, Latest, RunSummary, Timing
from perfagent_client.models import RunDetails, parse
from perfagent_client.watch.fleet import LOSSES, RATES

__all__ = ["NEWEST", "RunView"]

_CURVES = (LOSSES, RATES, ("step_time_s",))
"""Of each, the first that the run has is drawn."""
NEWEST = ("gpu/utilization_pct", "gpu/memory_used_bytes", "process/rss_bytes", "lr")
"""Of which the newest value stands beside the curves."""


@dataclass(slots=True)
class RunView:
    """curves: name -> a value a bucket over the whole run; alerts: newest first; console: the last lines."""

    run: RunDetails
    verdict: Finding
    timing: Timing
    latest: dict[str, Latest] = field(default_factory=dict)
    alerts: list[Alert] = field(default_factory=list)
    curves: dict[str, list[float]] = field(default_factory=dict)
    console: list[str] = field(default_factory=list)

    @property
    def firing(self) -> list[Alert]:
        return [alert for alert in self.alerts if alert.state == "firing"]

    def names_of_curves(self) -> list[str]:
        found = (next((name for name in names if name in self.latest), None) for names in _CURVES)
        return [name for name in found if name is not None]

    @staticmethod
    def subscription(run: str) -> dict[str, Any]:
        return {"runs": [run], "names": [*(name for names in _CURVES for name in names), *NEWEST], "bands": True}

    def take(self, message: Mapping[str, Any]) -> bool:
        """A message of the WebSocket. Whether verdict and alerts are to be asked for again."""
        if isinstance(message.get("alert"), Mapping):
            told = parse(Alert, message["alert"])
            if told.run == self.run.run:
                self.alerts = [told if alert.id == told.id else alert for alert in self.alerts]
                return True
        if isinstance(message.get("run"), Mapping):
            self._summary(parse(RunSummary, message["run"]))
        for band in message.get("bands") or ():
            self._band(band)
        return False

    def _summary(self, summary: RunSummary) -> None:
        if summary.run == self.run.run:
            for name in RunSummary.__dataclass_fields__:
                if name not in ("config", "meta"):  # a short one has not all of these
                    setattr(self.run, name, getattr(summary, name))

    def _band(self, band: Mapping[str, Any]) -> None:
        if band.get("run") != self.run.run or not band.get("step"):
            return
        value = float("nan") if band["nonfinite"][-1] else float(band["mean"][-1])
        step, time = int(band["step"][-1]), float(band["time"][-1])
        self.latest[str(band["name"])] = Latest(value=value, step=step, time=time, rank="all")
        self.run.step = max(self.run.step, step)
