"""`perfagent up`: the server with its dashboard, on one port."""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from perfagent import __version__
from perfagent.command_line.option_types import port
from perfagent.endpoint.addresses import DEFAULT_SERVER
from perfagent.endpoint.local_server import ADDRESS_FILE, LocalServer, data_folder
from perfagent.errors import ConfigError, ResourceError
from perfagent.process.variables import warn_of_misspelt
from perfagent_server.commands.server_lock import only_server
from perfagent_server.logs import configure_logs
from perfagent_server.settings import LogFormat, LogLevel, Settings

if TYPE_CHECKING:
    from perfagent_server.services import Services

__all__ = ["command"]

log = logging.getLogger("perfagent.server")


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = "Starts the server and its dashboard. Every option can be given as PERFAGENT_<OPTION> too."
    parser.add_argument(
        "--host", help="the address to listen on (default 127.0.0.1); on any but loopback, clients need keys"
    )
    parser.add_argument("--port", type=port, help="the port to listen on (default 8420); 0 is any free one")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="the data folder (default: $XDG_DATA_HOME/perfagent, or ~/.local/share/perfagent)",
    )
    parser.add_argument(
        "--database",
        metavar="URL",
        help="sqlite:////path/perfagent.db or postgresql://user@host/name (default: SQLite in the data folder)",
    )
    parser.add_argument(
        "--replica",
        action="store_true",
        default=None,
        help="run as one of several servers that share a PostgreSQL database (set it on all)",
    )
    parser.add_argument(
        "--metrics",
        metavar="URL",
        help="ClickHouse for samples: clickhouse://user:password@host:8123/perfagent (default: the database)",
    )
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="a folder of offline recordings to load at the start"
    )
    parser.add_argument(
        "--auth",
        choices=("auto", "required"),
        help="auto: keys unless bound to loopback; required: always keys (default auto)",
    )
    parser.add_argument(
        "--insecure-no-auth",
        action="store_true",
        default=None,
        help="reading and sending need no key on any address: only behind a proxy that authenticates requests",
    )
    parser.add_argument(
        "--allowed-hosts",
        nargs="+",
        metavar="NAME",
        help="further names that the Host header may have; * allows any",
    )
    parser.add_argument(
        "--forwarded-allow-ips", nargs="+", metavar="IP", help="proxies whose X-Forwarded-For the server believes"
    )
    parser.add_argument("--log-format", choices=get_args(LogFormat), help="json: one object per line (default text)")
    parser.add_argument(
        "--log-level",
        choices=get_args(LogLevel),
        help="the lowest level that is logged: debug, info, warning or error (default warning)",
    )
    parser.add_argument("--access-log", action="store_true", default=None, help="log a line for each request")
    parser.set_defaults(run=up)


def up(arguments: argparse.Namespace) -> int:
    settings = Settings.from_env(
        host=arguments.host, port=arguments.port, data=arguments.data, database=arguments.database, replica=arguments.replica,
        metrics=arguments.metrics, folder=arguments.folder, auth=arguments.auth, insecure_no_auth=arguments.insecure_no_auth,
        allowed_hosts=_names(arguments.allowed_hosts), forwarded_allow_ips=_names(arguments.forwarded_allow_ips),
        log_format=arguments.log_format, log_level=arguments.log_level, access_log=arguments.access_log,
    )  # fmt: skip
    if settings.folder is not None and not settings.folder.is_dir():
        raise ConfigError(f"--folder {settings.folder} is not a folder; give one that PERFAGENT_RECORD has written")
    configure_logs(settings.log_format, settings.log_level, access=settings.access_log)
    if settings.log_format == "json":
        warn_of_misspelt(log.warning)
    else:
        warn_of_misspelt(lambda sentence: print(f"perfagent up: {sentence}", file=sys.stderr))
    with contextlib.closing(_listen(settings)) as listening:
        host, port = listening.getsockname()[:2]
        # the name may mean ::1 to whoever asks, where anybody may listen
        settings = replace(settings, port=port, host=host if settings.host == "localhost" else settings.host)
        with only_server(settings):
            _serve(settings, listening)
    return 0


def _serve(settings: Settings, listening: socket.socket) -> None:
    # Imported late: `perfagent up --help` and a taken port should not wait for FastAPI and Dash.
    from perfagent_server.app import create_app
    from perfagent_server.services import open_services
    from perfagent_server.serving import make_server

    services = open_services(settings)
    try:
        _refuse_open_door(settings, services)
        server = make_server(create_app(settings, services=services), settings)
    except BaseException:
        services.database.close()
        raise
    LocalServer(settings.data).announce(settings.local_url)
    _announce(settings, services)
    helper = _take_in(settings)
    with contextlib.suppress(KeyboardInterrupt):
        # uvicorn raises the signal that stopped it once more when it is done. By default SIGTERM would then kill us
        # here, with the address file left behind and the helper running on.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        server.run(sockets=[listening])
    (settings.data / ADDRESS_FILE).unlink(missing_ok=True)
    if helper is not None:
        helper.terminate()
        helper.wait()
    if not server.started:
        raise ResourceError("the server could not start; the lines above say why")


def _refuse_open_door(settings: Settings, services: Services) -> None:
    if settings.loopback or settings.insecure_no_auth or settings.admin_token:
        return
    if services.access.keys.any_valid() or services.people.accounts.exist() or services.provider is not None:
        return
    raise ResourceError(
        f"{settings.host} can be reached from other machines and no key or user exists yet: make a key with `perfagent keys "
        "create ingest` "
        "(no server needed), or set PERFAGENT_ADMIN_TOKEN, or leave --host out; --insecure-no-auth lets everybody in"
    )


def _announce(settings: Settings, services: Services) -> None:
    if settings.log_format == "json":  # whoever collects the log must not get the one-time address
        about = {"version": __version__, "dashboard": settings.url, "data": str(settings.data)}
        log.warning("perfagent starts; `perfagent keys login` prints an address for the administrator", extra=about)
        return
    link = f"{settings.url}/login?token={services.access.sessions.issue_link()}"
    lines = [
        f"perfagent {__version__}",
        f"  dashboard  {settings.url}",
        f"  admin      {link}",
        "             (works once and makes a browser the administrator's; `perfagent keys login` prints another)",
        f"  data       {settings.data}",
    ]
    if settings.data.resolve() != data_folder().resolve() and settings.local_url != DEFAULT_SERVER:
        lines.append(
            f"  jobs       need PERFAGENT_SERVER={settings.url}: they find a server by the data folder {data_folder()}"
        )
    if settings.insecure_no_auth and not settings.loopback:
        lines.append("  WARNING    everybody who reaches this address can read and send (--insecure-no-auth)")
    elif not settings.open_access:
        lines.append("  keys       needed for everything: `perfagent keys create ingest|read|operate|admin`")
    print("\n".join(lines), flush=True)


def _take_in(settings: Settings) -> subprocess.Popen[bytes] | None:
    """Sends the recordings of --folder through the front door, by a process of its own: `perfagent sync`."""
    if settings.folder is None:
        return None
    environment = {name: value for name, value in os.environ.items() if name != "PERFAGENT_API_KEY"}
    environment |= {"PERFAGENT_SERVER": settings.local_url, "PERFAGENT_DATA": str(settings.data)}
    return subprocess.Popen([sys.executable, "-m", "perfagent", "sync", str(settings.folder)], env=environment)


def _listen(settings: Settings) -> socket.socket:
    """The bound socket. Raises ConfigError that says what to do about a taken port."""
    host = settings.host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"host {settings.host!r} is not an address of this machine ({error.strerror})") from error
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(2048)  # a thousand agents that come back at once
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ResourceError(
                f"port {settings.port} on {settings.host} is taken: if perfagent runs there already, open {settings.url}; "
                f"otherwise take another: `perfagent up --port {settings.port + 1}`"
            ) from error
        if error.errno == errno.EACCES:
            raise ResourceError(f"port {settings.port} may not be used by this user; ports from 1024 may") from error
        raise ResourceError(f"cannot listen on {settings.host}:{settings.port} ({error.strerror})") from error
    listening.set_inheritable(False)
    return listening


def _names(values: list[str] | None) -> tuple[str, ...] | None:
    """Both `--allowed-hosts a b` and `--allowed-hosts a,b`."""
    return None if values is None else tuple(name for value in values for name in value.split(",") if name)
