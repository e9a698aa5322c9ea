"""`perfagent runs`, `show`, `export` and `delete`: what the server knows, in a terminal. RUN is an id or a name."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from perfagent.errors import ConfigError
from perfagent.wire import Finding, Latest, RunSummary, Timing, to_json
from perfagent_client.client import ApiError, Client
from perfagent_client.models import RunDetails
from perfagent_client.techniques import sentences

__all__ = ["add_options", "delete", "export", "found", "output", "print_json", "reader", "runs", "show"]

_SHOWN = 10  # runs of one name
_LINES = 30  # of a traceback: its end says most


def runs(parser: argparse.ArgumentParser) -> None:
    parser.description = "Lists runs, newest first."
    parser.add_argument("--project", help="only of this project")
    parser.add_argument("--name", help="only of this name")
    parser.add_argument("--state", help="only in this state: running, finished, failed ...")
    parser.add_argument("--tag", help="only with this tag")
    parser.add_argument("--limit", type=_positive, default=50, metavar="N", help="at most so many (default 50)")
    add_options(parser)
    parser.set_defaults(run=_runs)


def show(parser: argparse.ArgumentParser) -> None:
    parser.description = "Shows one run: its verdict, what was found, and its newest figures."
    parser.add_argument("name_or_id", metavar="RUN")
    add_options(parser)
    parser.set_defaults(run=_show)


def export(parser: argparse.ArgumentParser) -> None:
    parser.description = "Writes every sample of a run, a row each; floats read back exactly."
    parser.add_argument("name_or_id", metavar="RUN")
    parser.add_argument("--format", choices=("jsonl", "csv", "parquet"), default="jsonl", help="default jsonl")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write here instead of standard output")
    add_options(parser, as_json=False)
    parser.set_defaults(run=_export)


def delete(parser: argparse.ArgumentParser) -> None:
    parser.description = "Deletes a run with everything that belongs to it. Needs an administrator's key or the admin token."
    parser.add_argument("name_or_id", metavar="RUN")
    parser.add_argument("--data", type=Path, metavar="DIR", help="the server's data folder, where the admin token lies")
    add_options(parser)
    parser.set_defaults(run=_delete)


def add_options(parser: argparse.ArgumentParser, *, as_json: bool = True) -> None:
    parser.add_argument(
        "--server", metavar="URL", help="the server's address (default: PERFAGENT_SERVER, else http://127.0.0.1:8420)"
    )
    if as_json:
        parser.add_argument("--json", action="store_true", help="print JSON")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def print_json(value: Any) -> None:
    sys.stdout.write(to_json(value).decode() + "\n")


def reader(arguments: argparse.Namespace, *, asks: bool = False) -> Client:
    """A client that may read: where the key of the environment may not, with the admin token of the server on this machine.
    asks: also to ask a training for something, for which a key that reads is not enough."""
    client = Client(arguments.server)
    token = _admin_token(None) if _is_recorded(client.server) else None
    if token is None:
        return client
    if asks:
        client.close()
        return Client(arguments.server, token)
    try:
        client.request("GET", "/runs", params={"limit": 1})
    except ApiError as error:
        if error.status not in (401, 403):
            raise
        client.close()
        return Client(arguments.server, token)
    return client


def found(client: Client, name_or_id: str, *, only: bool = False) -> RunDetails:
    """A run by its id, else the newest one of that name, which is said where there are several. only: raises ConfigError then."""
    run = client.find(name_or_id)
    if run.run == name_or_id:
        return run
    named = [each.run for each in client.runs(name=name_or_id, limit=_SHOWN)]
    if len(named) > 1:
        many = f"{len(named)}{' or more' if len(named) == _SHOWN else ''} runs are named {name_or_id!r}"
        if only:
            raise ConfigError(f"{many}: give the id of one, which is {', '.join(named[:-1])} or {named[-1]}")
        sys.stderr.write(f"perfagent: {many}; this is the newest, {run.run}\n")
    return run


def _is_recorded(server: str) -> bool:
    """Whether the server of this user's data folder said that it listens there: whoever else does is not told its token."""
    try:
        return _is_own(server) and (_data_folder(None) / "address").read_text().strip().rstrip("/") == server
    except OSError:
        return False


def _is_own(server: str) -> bool:
    """Whether it is an address of this machine's, and not only begins like one."""
    address = urlsplit(server)
    if address.scheme != "http" or "@" in address.netloc:
        return False
    try:
        return address.hostname == "localhost" or ipaddress.ip_address(address.hostname or "").is_loopback
    except ValueError:
        return False


def _runs(arguments: argparse.Namespace) -> int:
    with reader(arguments) as client:
        listed = list(
            client.runs(
                project=arguments.project, name=arguments.name, state=arguments.state, tag=arguments.tag, limit=arguments.limit
            )
        )
    if arguments.json:
        print_json({"runs": listed})
    elif not listed:
        print("no runs")
    else:
        _table(listed)
    return 0


def _table(listed: list[RunSummary]) -> None:
    head = ("RUN", "NAME", "PROJECT", "STATE", "STEP", "STARTED")
    rows = [(row.run, row.name, row.project, row.state, str(row.step), row.started[:19].replace("T", " ")) for row in listed]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _show(arguments: argparse.Namespace) -> int:
    with reader(arguments) as client:
        run = found(client, arguments.name_or_id)
        verdict, findings, latest = client.verdict(run.run), client.findings(run.run), client.latest(run.run)
        alerts, timing = client.alerts(run.run), client.timing(run.run)
    if arguments.json:
        summary = json.loads(to_json(run))
        figures = {name: item.value for name, item in latest.items()}
        print_json({**summary, "verdict": verdict, "findings": findings, "latest": figures, "timing": timing, "alerts": alerts})
        return 0
    print(f"{run.name}  ({run.project}, {run.run})")
    print(
        f"{run.state}{': ' + run.reason if run.reason else ''}, step {run.step}, started {run.started[:19].replace('T', ' ')} UTC"
    )
    if run.notes:
        print(run.notes)
    for line in sentences(run.config):
        print(line)
    print()
    _finding(verdict)
    for finding in findings:
        if finding != verdict:
            _finding(finding)
    _figures(latest)
    _timing(timing)
    return 0


def _finding(finding: Finding) -> None:
    since = f" (since step {finding.since_step})" if finding.since_step is not None else ""
    print(f"[{finding.severity}] {finding.rule}: {finding.message}{since}")
    if finding.fix:
        print(f"    {finding.fix}")
    traceback = finding.evidence.get("traceback")
    if isinstance(traceback, str):
        for line in traceback.splitlines()[-_LINES:]:
            print(f"    | {line}")


def _figures(latest: dict[str, Latest]) -> None:
    if latest:
        print()
    width = max((len(name) for name in latest), default=0)
    for name, item in sorted(latest.items()):
        print(f"{name.ljust(width)}  {item.value:.6g}")


def _timing(timing: Timing) -> None:
    """A line a phase, the longest first."""
    if not timing.series:
        return
    print(f"\nsteps {timing.from_step} to {timing.to_step}, ms".ljust(30) + "      P50       P90       P99")
    for name, phase in sorted(timing.series.items(), key=lambda item: -item[1].mean):
        print(name.ljust(28) + "".join(f"{1000 * value:10.3f}" for value in (phase.p50, phase.p90, phase.p99)))
    print("  ".join(f"{share} {100 * value:.1f} %" for share, value in timing.shares.items()))


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
        raise ConfigError(f"{path} cannot be written ({error.strerror})") from error
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
    with Client(arguments.server) as asked:
        own = _is_own(asked.server)
    # This machine's token is for this machine's server: it must not be sent to whatever address --server names.
    with Client(arguments.server, _admin_token(arguments.data) if own else os.environ.get("PERFAGENT_ADMIN_TOKEN")) as client:
        run = found(client, arguments.name_or_id, only=True)
        client.delete(run.run)
    if arguments.json:
        print_json({"run": run.run, "deleted": True})
    else:
        print(f"{run.name} ({run.run}) is deleted")
    return 0


def _admin_token(data: Path | None) -> str | None:
    """The admin token of a server on this machine, None where there is none to read: PERFAGENT_API_KEY is used then."""
    if os.environ.get("PERFAGENT_ADMIN_TOKEN"):
        return os.environ["PERFAGENT_ADMIN_TOKEN"]
    try:
        return (_data_folder(data) / "admin-token").read_text().strip() or None
    except OSError:
        return None


def _data_folder(data: Path | None) -> Path:
    if data is None:
        base = os.environ.get("PERFAGENT_DATA")
        data = Path(base) if base else Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share") / "perfagent"
    return data.expanduser()
