"""How a command of the client reaches the server and finds the run that it means: the options that all of them
share."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from perfagent.errors import PerfagentError
from perfagent.local_server import LocalServer, is_own_address, server_address
from perfagent.wire import to_json
from perfagent_client.client import ApiError, Client
from perfagent_client.models import RunDetails

__all__ = ["add_options", "add_run", "administrator", "found", "print_json", "reader"]

_LISTED = 10  # runs of one name
_COMPLETION_S = 1.0


def add_run(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """RUN, an id or a name; a shell completes both."""
    action = parser.add_argument(
        "name_or_id",
        metavar="RUN",
        nargs="?" if optional else None,
        help="the run's id or its name; of several with that name the newest",
    )
    action.completer = _completions  # type: ignore[attr-defined] # where argcomplete looks for it


def add_options(parser: argparse.ArgumentParser, *, as_json: bool = True) -> None:
    """--server, --data and --json."""
    parser.add_argument(
        "--server", metavar="URL",
        help="the server's address (default: PERFAGENT_SERVER, else the server of this user's data folder, else "
        "http://127.0.0.1:8420)",
    )  # fmt: skip
    parser.add_argument(
        "--data",
        metavar="DIR",
        type=Path,
        help="the data folder of the server on this machine: its address and its admin token",
    )
    if as_json:
        parser.add_argument("--json", action="store_true", help="print JSON")


def print_json(value: Any) -> None:
    sys.stdout.write(to_json(value).decode() + "\n")
    sys.stdout.flush()


def reader(arguments: argparse.Namespace, *, asks: bool = False) -> Client:
    """A client that may read: where the key of the environment may not, with the admin token of the server on this
    machine. asks: also to ask a training for something, for which a key that reads is not enough."""
    client = Client(server_address(arguments.server, arguments.data))
    # Whoever else listens at such an address is not sent the token of this user's server.
    recorded = is_own_address(client.server) and _local(arguments).is_at(client.server)
    token = _admin_token(arguments, client.server) if recorded else None
    if token is None:
        return client
    if asks:
        client.close()
        return Client(client.server, token)
    try:
        client.request("GET", "/runs", params={"limit": 1})
    except ApiError as error:
        if error.status not in (401, 403):
            raise
        client.close()
        return Client(client.server, token)
    return client


def administrator(arguments: argparse.Namespace) -> Client:
    """A client with an administrator's rights, where this user has them: PERFAGENT_ADMIN_TOKEN, else the token in the
    data folder, else PERFAGENT_API_KEY."""
    server = server_address(arguments.server, arguments.data)
    with Client(server) as asked:
        return Client(server, _admin_token(arguments, asked.server))


def found(client: Client, name_or_id: str, *, only: bool = False) -> RunDetails:
    """A run by its id, else the newest one of that name, which is said where there are several. only: raises an error
    then."""
    run = client.find(name_or_id)
    if run.run == name_or_id:
        return run
    named = [each.run for each in client.runs(name=name_or_id, limit=_LISTED)]
    if len(named) > 1:
        many = f"{len(named)}{' or more' if len(named) == _LISTED else ''} runs are named {name_or_id!r}"
        if only:
            raise PerfagentError(f"{many}: give the id of one, which is {', '.join(named[:-1])} or {named[-1]}")
        sys.stderr.write(f"perfagent: {many}; this is the newest, {run.run}\n")
    return run


def _local(arguments: argparse.Namespace) -> LocalServer:
    return LocalServer() if arguments.data is None else LocalServer(arguments.data.expanduser())


def _admin_token(arguments: argparse.Namespace, server: str) -> str | None:
    return os.environ.get("PERFAGENT_ADMIN_TOKEN") or _local(arguments).token_for(server)


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
