"""Says what a profile of some steps shows: where their time went."""

from __future__ import annotations

from typing import Literal

from perfagent.wire.evidence import ProfileEvidence
from perfagent_server.rules.texts import Language, Phrases

__all__ = ["sentences"]

_LOADER = "enumerate(DataLoader)#"
"""torch's own annotation round __next__ of every DataLoader."""
_NAMED = 3
_NAME_CHARACTERS = 60
_WORTH_SAYING = 0.005
"""Of the steps; less is noise."""

Times = Literal["self_cpu_s", "total_cpu_s", "self_device_s", "total_device_s"]


def sentences(found: ProfileEvidence, language: Language) -> list[str]:
    """The most important first."""
    shares = found["shares"]
    whole = shares["steps_s"]
    if not whole > 0:
        return []
    phrases = Phrases("profile", language)
    parts = {
        "loader": shares["loader_s"], "operators": shares["operators_s"],
        "communication": shares["communication_alone_s"] if found["gaps"]["of"] == "operators" else 0.0,
        "outside": shares["outside_s"],
    }  # fmt: skip
    worth = sorted(((s, part) for part, s in parts.items() if s >= _WORTH_SAYING * whole), key=lambda one: -one[0])
    spent = [phrases.say("part", {"share_pct": 100 * s / whole, "part": part}) for s, part in worth]
    figures = {**shares, **{f"{name.removesuffix('_s')}_pct": 100 * s / whole for name, s in shares.items()}}
    idle = found["gaps"].get("idle_pct") if found["gaps"]["of"] == "device" else None
    first, last = found["steps"]
    said = [phrases.say("spent", {**figures, "steps": last - first + 1, "spent": spent, "idle_pct": idle})]
    if shares.get("device_wait_s", 0.0) >= _WORTH_SAYING * whole:
        said.append(phrases.say("waited", figures))
    if shares["communication_s"]:
        said.append(phrases.say("communication", figures))
    if "h2d_s" in shares:
        said += [phrases.say("device_copies", figures)] if shares["h2d_s"] or shares["d2h_s"] else []
    elif shares["copies_s"]:
        said.append(phrases.say("copies", figures))
    on_device = any(one.get("self_device_s") for one in found["operators"])
    own = _most(found, "self_device_s" if on_device else "self_cpu_s", phrases)
    total = _most(found, "total_device_s" if on_device else "total_cpu_s", phrases)
    return [*said, phrases.say("most_time", {"own": own, "total": total})] if own else said


def _most(found: ProfileEvidence, time: Times, phrases: Phrases) -> list[str]:
    """The operators with the most of such a time."""
    operators = [one for one in found["operators"] if one.get(time) and not one["name"].startswith(_LOADER)]
    most = sorted(operators, key=lambda one: -one[time])[:_NAMED]
    return [phrases.say("operator", {"name": one["name"][:_NAME_CHARACTERS], "took_s": one[time]}) for one in most]
