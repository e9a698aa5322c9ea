"""`perfagent alerts add|rules|remove`: alerts that users make themselves, without code."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any
from urllib.parse import quote, urlencode

from perfagent.command_line.terminal_output import Screen, Table
from perfagent.errors import ConfigError
from perfagent.wire.quantities import some
from perfagent_server.commands.connection import AdminApi, add_options

__all__ = ["own_alerts"]

_COMPARED = {"above": ">", "at_least": ">=", "below": "<", "at_most": "<="}
_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?) *(steps?|s|min|h|d)?")
_EXAMPLE = "perfagent alerts add high-val --metric val/loss --above 3 --for 20"


def own_alerts(actions: Any) -> None:
    add = actions.add_parser(
        "add", help="make an alert of your own",
        description=f"Makes an alert of your own, or changes the one of this name. As: {_EXAMPLE}",
    )  # fmt: skip
    add.add_argument("name", help="what it is called: its rule is own:NAME")
    add.add_argument("--metric", required=True, metavar="NAME", help="a series, or a pattern such as 'loss/*'")
    what = add.add_mutually_exclusive_group(required=True)
    for name, sign in _COMPARED.items():
        what.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="X", help=f"fires when it is {sign} X")
    for name, said in (("rise", "risen"), ("fall", "fallen")):
        what.add_argument(
            f"--no-{name}", dest="function", action="store_const", const=name, help=f"fires when it has not {said}"
        )
    what.add_argument(
        "--missing", dest="function", action="store_const", const="missing", help="fires when it is missing"
    )
    add.add_argument(
        "--for",
        dest="duration",
        type=_duration,
        required=True,
        metavar="N",
        help="for how long: 20 (steps), 30s, 10min, 2h",
    )
    add.add_argument("--over", choices=("mean", "min", "max"), help="compare this of the duration, not each value")
    add.add_argument("--severity", choices=("info", "warning", "critical"), default="warning", help="default: warning")
    add.add_argument("--project", default="", metavar="NAME", help="only in runs of this project")
    add.add_argument(
        "--tag", dest="tags", action="append", default=[], help="only in runs with this tag; may be repeated"
    )
    add.add_argument("--note", default="", help="ends the message")
    add.add_argument(
        "--try", dest="try_on", metavar="RUN", help="save nothing; show when it would have fired in this run"
    )
    add.set_defaults(run=_add)
    rules = actions.add_parser("rules", help="list the alerts of your own")
    rules.set_defaults(run=_list)
    remove = actions.add_parser("remove", help="remove an alert of your own: what it had found is resolved")
    remove.add_argument("name")
    remove.set_defaults(run=_remove)
    for action in (rules, remove):
        action.add_argument("--project", default="", metavar="NAME", help="of this project")
    for action in (add, rules, remove):
        add_options(action)


def _duration(text: str) -> dict[str, float]:
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; give 20 (steps), 30s, 10min, 2h or 1d")
    number, unit = float(found[1]), found[2] or "steps"
    if unit not in _UNITS:
        if number != int(number):
            raise argparse.ArgumentTypeError(f"{text!r}: steps are a whole number")
        return {"for_steps": int(number)}
    return {"for_s": number * _UNITS[unit]}


def _add(arguments: argparse.Namespace) -> int:
    if arguments.over and arguments.function:
        raise ConfigError("--over goes with --above, --at-least, --below or --at-most")
    form: dict[str, Any] = {"metric": arguments.metric, "function": arguments.over or arguments.function or "value"}
    for name, sign in _COMPARED.items():
        if getattr(arguments, name) is not None:
            form |= {"comparison": sign, "threshold": getattr(arguments, name)}
    form |= {**arguments.duration, **{name: getattr(arguments, name) for name in ("severity", "tags", "note")}}
    api, query = AdminApi.from_arguments(arguments), _query(arguments)
    if arguments.try_on is not None:
        found = api.request(
            "POST", f"/rules/alerts/try{query}", {**form, "name": arguments.name, "run": arguments.try_on}
        )
        return _show_tried(found, as_json=arguments.json)
    made = api.request("PUT", f"/rules/alerts/{quote(arguments.name, safe='')}{query}", form)
    print(json.dumps(made) if arguments.json else f"{made['rule']}: {made['title']}")
    return 0


def _show_tried(found: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(found))
        return 0
    screen = Screen()
    if not found["series"]:
        screen.line("no series of this run matches")
    times = "once" if found["count"] == 1 else f"{found['count']:,} times"
    screen.line(f"would have fired {times} in {some(found['samples'], 'sample')} of {len(found['series'])} series")
    if found["left_out"]:
        screen.line(f"{some(found['left_out'], 'older sample')} were not judged")
    if found["fired"]:
        rows = [(f"{one['step']:,}", f"{one['until_step']:,}", one["message"]) for one in found["fired"]]
        screen.table(Table(("FIRED AT", "UNTIL", "WHAT"), rows, narrow=(2,)))
    return 0


def _list(arguments: argparse.Namespace) -> int:
    found = AdminApi.from_arguments(arguments).request("GET", f"/rules/alerts{_query(arguments)}")
    if arguments.json:
        print(json.dumps(found))
        return 0
    screen = Screen()
    if not found["alerts"]:
        screen.line(f"no alerts of your own; make one: {_EXAMPLE}")
        return 0
    rows = [
        (
            one["name"], one["title"], one["severity"], one["project"] or "all", ", ".join(one["tags"]),
            "rules.toml" if one["from_file"] else "", one["note"],
        )
        for one in found["alerts"]
    ]  # fmt: skip
    screen.table(Table(("NAME", "FIRES WHEN", "SEVERITY", "PROJECT", "TAGS", "FILE", "NOTE"), rows, narrow=(1, 6)))
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    AdminApi.from_arguments(arguments).request(
        "DELETE", f"/rules/alerts/{quote(arguments.name, safe='')}{_query(arguments)}"
    )
    print(json.dumps({"name": arguments.name, "removed": True}) if arguments.json else f"{arguments.name} is removed")
    return 0


def _query(arguments: argparse.Namespace) -> str:
    return f"?{urlencode({'project': arguments.project})}" if arguments.project else ""
