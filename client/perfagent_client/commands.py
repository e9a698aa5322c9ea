"""`perfagent runs`, `export` and `delete`. RUN is an id or a name."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from perfagent.command_line.option_types import positive
from perfagent.command_line.terminal_output import Screen, Table, agreed, somebody_can_answer
from perfagent.errors import ConfigError, ResourceError
from perfagent.wire import OUTCOMES, STATES, from_json
from perfagent.wire.quantities import some
from perfagent_client.client import Client
from perfagent_client.connection import add_options, add_run, administrator, found, print_json, reader
from perfagent_client.models import RunDetails

__all__ = ["delete", "export", "moment", "output", "runs"]


def runs(parser: argparse.ArgumentParser) -> None:
    parser.description = "Lists runs with their verdicts, losses and throughput, newest first."
    parser.add_argument("--project", help="only of this project")
    parser.add_argument("--name", help="only of this name")
    state = parser.add_argument(
        "--state", metavar="STATE",
        help=f"only in this state: {', '.join(STATES)} (lost: no contact)",
    )  # fmt: skip
    state.completer = lambda **_: STATES  # type: ignore[attr-defined] # no `choices`: a newer server may know more
    severity = parser.add_argument(
        "--severity", metavar="WORD", action="append",
        help=f"only runs of this verdict: {', '.join(OUTCOMES)} (unknown: nothing was judged); may be given again",
    )  # fmt: skip
    severity.completer = lambda **_: OUTCOMES  # type: ignore[attr-defined]
    parser.add_argument("--tag", help="only with this tag")
    parser.add_argument(
        "--since",
        type=moment,
        metavar="WHEN",
        help="only runs that sent something since then: 90m, 24h, 7d, 2026-03-01",
    )
    parser.add_argument(
        "--sort", metavar="BY",
        help="started, updated, name, project, state, step, severity, the name of a metric, or config:NAME",
    )  # fmt: skip
    parser.add_argument("--limit", type=positive, default=50, metavar="N", help="at most so many (default 50)")
    add_options(parser)
    parser.set_defaults(run=_runs)


def moment(text: str) -> str:
    """A moment as RFC 3339: so long ago (`30s`, `90m` or `90min`, `24h`, `7d`), or a local date with or without a time."""
    ago = re.fullmatch(r"(\d{1,6})\s*(s|m|min|h|d)", text.strip())
    try:
        if ago:
            length = timedelta(seconds=int(ago[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}[ago[2]])
            return (datetime.now(UTC) - length).isoformat()
        return datetime.fromisoformat(text.strip()).astimezone(UTC).isoformat()
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"is {text!r}; allowed are 30s, 90m, 24h, 7d, and a date such as 2026-03-01 or 2026-03-01T18:00"
        ) from None


def export(parser: argparse.ArgumentParser) -> None:
    parser.description = "Writes every sample of a run, a row each; floats read back exactly."
    add_run(parser)
    parser.add_argument("--format", choices=("jsonl", "csv", "parquet"), default="jsonl", help="default jsonl")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write here instead of standard output")
    add_options(parser, as_json=False)
    parser.set_defaults(run=_export)


def delete(parser: argparse.ArgumentParser) -> None:
    parser.description = "Deletes a run with all that belongs to it, after a question. Needs an administrator's rights."
    add_run(parser, default="")
    parser.add_argument("--yes", action="store_true", help="do not ask; needed where no terminal can be asked")
    add_options(parser)
    parser.set_defaults(run=_delete)


def _runs(arguments: argparse.Namespace) -> int:
    chosen = {name: getattr(arguments, name) for name in _FILTERS if getattr(arguments, name)}
    order = {"sort": arguments.sort, "order": "desc" if arguments.sort not in _ASCENDING else "asc"}
    asked = {"with": "verdict,latest,timing,config", **chosen, **(order if arguments.sort else {})}
    with reader(arguments) as client:
        listed = list(islice(_rows(client, asked), arguments.limit))
    if arguments.json:
        print_json({"runs": [{**row, **_figures(row)} for row in listed]})
        return 0
    screen = Screen()
    if not listed:
        screen.line("no runs" + (" like that; `perfagent runs` lists all" if chosen else ""))
        return 0
    zone = datetime.now().astimezone().tzname()
    head = ("RUN", "NAME", "PROJECT", "STATE", "STEP", "VERDICT", "LOSS", "SAMPLES/S", "TAGS", f"STARTED ({zone})")
    screen.table(Table(head, [_cells(row) for row in listed], right=(4, 6, 7), narrow=(1, 2, 8)))
    if len(listed) == arguments.limit:
        sys.stderr.write(f"the {'first' if arguments.sort else 'newest'} {arguments.limit:,}; --limit N lists more\n")
    return 0


_FILTERS = ("project", "name", "state", "severity", "tag", "since")
_ASCENDING = ("name", "project", "state")


def _rows(client: Client, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of the server's table of runs, as many as are asked for."""
    offset: int | None = 0
    while offset is not None:
        page = client.request("GET", "/runs", params={**asked, "limit": 50, "offset": offset})
        yield from page["runs"]
        offset = page["next"]


def _figures(row: dict[str, Any]) -> dict[str, Any]:
    """As `perfagent show` and the pages have them: severity and rule of the verdict, and throughput over the window."""
    verdict = row["verdict"]
    return {
        "severity": verdict["outcome"], "rule": verdict["rule"], "loss": row["latest"].get(row["loss"]),
        "samples_per_s": row["timing"]["rates"].get("samples_per_s"),
    }  # fmt: skip


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    figures = _figures(row)
    own = row["verdict"]["title"] if figures["rule"] == "user_alert" else figures["rule"]
    rule = "" if figures["rule"] == "healthy" else f" {own}"
    loss, rate = (figures[name] for name in ("loss", "samples_per_s"))
    return (
        row["run"], row["name"], row["project"], row["state"], f"{row['step']:,}", f"{figures['severity']}{rule}",
        "" if loss is None else f"{from_json(loss):.4g}", "" if rate is None else f"{from_json(rate):.4g}",
        " ".join(row["tags"]), datetime.fromisoformat(row["started"]).astimezone().strftime("%Y-%m-%d %H:%M:%S"),
    )  # fmt: skip


def _export(arguments: argparse.Namespace) -> int:
    if arguments.format == "parquet" and arguments.output is None and sys.stdout.isatty():
        raise ConfigError("a Parquet file is no text for a terminal: name a file with -o FILE, or pipe it")
    with reader(arguments) as client:
        run = found(client, arguments.name_or_id)
        pieces = client.export_bytes(run.run, arguments.format)
        first = next(pieces, b"")  # an error of the server comes before a file is touched
        with output(arguments.output) as file:
            file.write(first)
            for piece in pieces:
                file.write(piece)
    return 0


@contextlib.contextmanager
def output(path: Path | None) -> Iterator[BinaryIO]:
    """Standard output, or a file that appears under its name only when it is complete."""
    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise ResourceError(f"{path} cannot be written ({error.strerror})") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)  # as any program's output; mkstemp made it private
        Path(name).rename(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _delete(arguments: argparse.Namespace) -> int:
    if not (arguments.yes or somebody_can_answer()):
        raise ConfigError(
            f"nothing is deleted: there is no terminal to ask on; "
            f"`perfagent delete {shlex.quote(arguments.name_or_id)} --yes` deletes unasked"
        )
    with administrator(arguments) as client:
        run = found(client, arguments.name_or_id, only=True)
        if not (arguments.yes or _agreed(run)):
            sys.stderr.write("nothing is deleted\n")
            return 1
        client.delete(run.run)
    if arguments.json:
        print_json({"run": run.run, "deleted": True})
    else:
        print(f"{run.name} ({run.run}) is deleted")
    return 0


def _agreed(run: RunDetails) -> bool:
    alive = f" It is {run.state}: what it still sends is lost." if run.state in ("starting", "running") else ""
    started = run.started[:19].replace("T", " ")
    what = f"run {run.name} ({run.run}), {some(run.step, 'step')}, started {started} UTC"
    return agreed(f"delete {what}? There is no way back.{alive}")
