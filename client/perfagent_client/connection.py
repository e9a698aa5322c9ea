"""How a command of the client reaches the server and finds the run that it means: the options that all of them
share."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from perfagent.command_line.option_types import add_server_options
from perfagent.command_line.parser import closest
from perfagent.endpoint.admin_proof import AdminProof
from perfagent.endpoint.local_server import credentials, server_address
from perfagent.errors import PerfagentError
from perfagent.wire import RunSummary, to_json
from perfagent_client.client import ApiError, Client
from perfagent_client.models import RunDetails

__all__ = ["add_options", "add_run", "administrator", "found", "print_json", "reader"]

_LISTED = 10  # runs of one name
_LOOKED_AT = 200  # runs, for the name that was meant
_COMPLETION_S = 1.0


def add_run(parser: argparse.ArgumentParser, *, default: str = "the newest run") -> None:
    """RUN, an id or a name; a shell completes both. default: what no RUN means; empty where one must be given."""
    loosely = ", with or without its random ending; of several the newest"
    action = parser.add_argument(
        "name_or_id",
        metavar="RUN",
        nargs="?" if default else None,
        help=f"the run's id or its name{f'{loosely} (default: {default})' if default else ''}",
    )
    action.completer = _completions  # type: ignore[attr-defined] # where argcomplete looks for it


def add_options(parser: argparse.ArgumentParser, *, as_json: bool = True) -> None:
    """--server, --data and --json."""
    add_server_options(parser)
    if as_json:
        parser.add_argument("--json", action="store_true", help="print JSON")


def print_json(value: Any) -> None:
    text = to_json(value).decode()
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a console without UTF-8: JSON has escapes for that
        text = json.dumps(json.loads(text))
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def reader(arguments: argparse.Namespace, *, asks: bool = False) -> Client:
    """A client that may read: with the key of the environment, else without one, and where that may not, as the
    administrator of this user's own server. asks: also to ask a training for something, which needs more."""
    client = Client(server_address(arguments.server, arguments.data))
    proof = None if client.api_key else credentials(client.server, arguments.data)
    if not isinstance(proof, AdminProof):
        return client
    if asks:
        client.close()
        return Client(client.server, proof)
    try:
        client.request("GET", "/runs", params={"limit": 1})
    except ApiError as error:
        if error.status not in (401, 403):
            raise
        client.close()
        return Client(client.server, proof)
    return client


def administrator(arguments: argparse.Namespace) -> Client:
    """A client with an administrator's rights, where this user has them (`credentials`)."""
    server = server_address(arguments.server, arguments.data)
    return Client(server, credentials(server, arguments.data))


def found(client: Client, name_or_id: str | None, *, only: bool = False, loosely: bool = True) -> RunDetails:
    """A run by its id, else the newest one of that name, which is said where there are several. only: raises an error
    then. loosely: None is the newest run, and `train` that of `train-2yee` where no run is named so; which is said."""
    if name_or_id is None:
        for newest in client.runs(limit=1):
            return _said(client, "this is the newest run", newest)
        raise PerfagentError("the server has no run yet")
    try:
        run = client.find(name_or_id)
    except ApiError as error:
        if error.status != 404:
            raise
        listed = list(client.runs(limit=_LOOKED_AT))
        for one in listed:
            if loosely and not only and one.name == f"{name_or_id}-{one.run[:4]}":  # identity/naming.py
                return _said(client, f"no run is named {name_or_id!r}; this is the newest with a random ending", one)
        meant = closest(name_or_id, [name for one in listed for name in (one.name, one.run)])
        hint = f"did you mean {meant!r}? " if meant else ""
        raise PerfagentError(
            f"there is no run with the id or name {name_or_id!r}; {hint}`perfagent runs` lists them"
        ) from None
    if run.run == name_or_id:
        return run
    named = [each.run for each in client.runs(name=name_or_id, limit=_LISTED)]
    if len(named) > 1:
        many = f"{len(named)}{' or more' if len(named) == _LISTED else ''} runs are named {name_or_id!r}"
        if only:
            raise PerfagentError(f"{many}: give the id of one, which is {', '.join(named[:-1])} or {named[-1]}")
        sys.stderr.write(f"perfagent: {many}; this is the newest, {run.run}\n")
    return run


def _said(client: Client, what: str, chosen: RunSummary) -> RunDetails:
    """Says which run was chosen."""
    sys.stderr.write(f"perfagent: {what}, {chosen.name} ({chosen.run})\n")
    return client.run(chosen.run)


def _completions(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> dict[str, str]:
    """Ids and names of the newest runs, with what each is; none where no server answers at once."""
    try:
        with reader(parsed_args) as client:
            client.http.timeout = _COMPLETION_S
            listed = list(client.runs(limit=50))
    except PerfagentError:
        return {}
    words = {run.run: f"{run.name}: {run.state}, step {run.step}" for run in listed}
    words |= {run.name: f"{run.state}, step {run.step}" for run in reversed(listed)}
    return {word: what for word, what in words.items() if word.startswith(prefix)}
