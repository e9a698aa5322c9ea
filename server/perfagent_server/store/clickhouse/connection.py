"""The one door to ClickHouse: its address, requests with time limits, and what its errors mean."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

import numpy as np
import numpy.typing as npt

from perfagent.errors import ConfigError, ResourceError, how_to_install
from perfagent_server.database import StorageError

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

__all__ = ["Address", "Away", "ClickHouse"]

_EXAMPLE = "clickhouse://user:password@host:8123/perfagent"
_CONNECT_S = 3
_ANSWER_S = 30
_LONG_S = 600  # for what works through many samples: rollups, deletions


class Away(StorageError):  # noqa: N818 - a state of ClickHouse, as StorageFull is one of the disk
    """ClickHouse does not answer: what needs compacted samples has to wait, what is sent is still taken."""

    retry_after_s = 10.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where ClickHouse is. database: the name of ours in it; cluster: for tables ON CLUSTER, None for one node."""

    host: str
    port: int
    user: str = "default"
    password: str = field(default="", repr=False)
    database: str = "perfagent"
    secure: bool = False
    cluster: str | None = None

    def __str__(self) -> str:
        """For messages: without user and password."""
        return f"{self.host}:{self.port}/{self.database}"

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises ConfigError for what is no address. What was given is not shown: it may hold a password."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ConfigError(f"metrics must be an address as {_EXAMPLE}; what was given is none") from None
        if parts.scheme != "clickhouse" or not parts.hostname:
            raise ConfigError(
                f"metrics must be the address of a ClickHouse server, as {_EXAMPLE} (its HTTP port); leave it out to keep "
                "samples in the database"
            )
        options = dict(parse_qsl(parts.query))
        unknown = options.keys() - {"secure", "cluster"}
        if unknown:
            raise ConfigError(
                f"metrics has the option {min(unknown)[:40]!r}; allowed are secure=1 (HTTPS) and cluster=NAME"
            )
        secure = options.get("secure", "0") in ("1", "true", "yes")
        database = unquote(parts.path.strip("/")) or "perfagent"
        for word in filter(None, (database, options.get("cluster"))):
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", word):
                raise ConfigError(f"{word[:80]!r} in metrics cannot be a name; letters, digits and _ are allowed")
        return cls(
            host=parts.hostname,
            port=port or (8443 if secure else 8123),
            user=unquote(parts.username or "default"),
            password=unquote(parts.password or ""),
            database=database,
            secure=secure,
            cluster=options.get("cluster"),
        )


class ClickHouse:
    """Safe from any thread. Nothing is asked before the first request. Every request raises Away when there is no answer
    in time, and ClickHouseError (of clickhouse-connect) for an answer that is an error."""

    def __init__(self, address: Address) -> None:
        try:
            import clickhouse_connect
        except ModuleNotFoundError as error:
            raise ResourceError(f"ClickHouse needs clickhouse-connect; {how_to_install('clickhouse')}") from error
        # Both warn of each try that nobody answered; Away says it once.
        for name in ("clickhouse_connect", "urllib3.connectionpool"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self.address = address
        self._connect = clickhouse_connect.get_client
        self._lock = threading.Lock()
        self._clients: dict[int, Client] = {}  # by the seconds that they wait for an answer
        self.away_since: str = ""  # why the last request found nobody; empty: it was answered

    def rows(self, query: str, parameters: Mapping[str, Any], row: npt.DTypeLike) -> npt.NDArray[Any]:
        """The result of a query whose columns have fixed widths, as one array of structures: every bit as it is stored."""
        kind = np.dtype(row)
        answer = self._ask(_ANSWER_S, lambda client: client.raw_query(query, dict(parameters), fmt="RowBinary"))
        return np.frombuffer(answer, kind)

    def run(
        self,
        statement: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        data: bytes | None = None,
        settings: Mapping[str, Any] | None = None,
        long: bool = False,
    ) -> Any:
        """A statement, or an INSERT with its data; answers the one value that it gives, if any."""
        values = None if parameters is None else dict(parameters)

        def ask(client: Client) -> Any:
            return client.command(statement, values, data=data, settings=dict(settings or {}))

        return self._ask(_LONG_S if long else _ANSWER_S, ask)

    def answers(self) -> bool:
        """Whether anybody is there."""
        try:
            self.run("SELECT 1")
        except StorageError:
            return False
        return True

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def _ask(self, seconds: int, ask: Any) -> Any:
        from clickhouse_connect.driver.exceptions import DatabaseError, OperationalError

        try:
            found = ask(self._client(seconds))
        except OperationalError as error:
            self.away_since = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise Away(
                f"ClickHouse at {self.address} does not answer; samples that were sent are kept meanwhile"
            ) from error
        except DatabaseError as error:
            if _is_passing(str(error)):
                raise Away(
                    f"ClickHouse at {self.address} is too busy; samples that were sent are kept meanwhile"
                ) from error
            raise
        self.away_since = ""
        return found

    def _client(self, seconds: int) -> Client:
        client = self._clients.get(seconds)
        if client is not None:
            return client
        with self._lock:
            if seconds not in self._clients:
                address = self.address
                # No session: requests of several threads go side by side. The names of tables say their database, which
                # may not exist yet.
                self._clients[seconds] = self._connect(
                    host=address.host, port=address.port, username=address.user, password=address.password,
                    secure=address.secure, connect_timeout=_CONNECT_S, send_receive_timeout=seconds,
                    autogenerate_session_id=False, query_retries=0,
                )  # fmt: skip
            return self._clients[seconds]


_PASSING = (159, 202, 203, 209, 210, 241, 242, 252, 279, 285, 319, 999)
"""Codes of errors that pass: too slow, too many queries, memory or parts, a read-only or lost replica, Keeper."""


def _is_passing(message: str) -> bool:
    found = re.search(r"[Cc]ode: (\d+)", message)
    return found is not None and int(found[1]) in _PASSING
