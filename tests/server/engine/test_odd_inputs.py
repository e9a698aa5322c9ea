"""No input silences the alerts: after any input, a NaN in another run reaches a channel within two rounds, and /readyz
answers 200.

The inputs are given in batches to one server whose rules go round by hand. A batch that silences the rules is given again,
one input after the other, to a new server, so that the failure names the input.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import clickhouse_server
import msgspec
import postgresql_server
import pytest
from api_builders import MSGPACK, settings_for
from clocks import Clock
from engine_bench import NOW
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from odd_inputs import ODD, Odd
from posting import Posts
from sqlalchemy import Connection, insert, select, text
from sqlalchemy.exc import SQLAlchemyError

from perfagent.errors import ConfigError, PerfagentError
from perfagent.wire import Frame, Group, encode
from perfagent_server.alerts import channels
from perfagent_server.alerts.outbox import Outbox
from perfagent_server.app import create_app
from perfagent_server.engine.rules_file import read_rules_file
from perfagent_server.engine.scheduler import Engine
from perfagent_server.engine.watchdog import Watchdog
from perfagent_server.rules.catalogue import rules_for
from perfagent_server.rules.plan import Plan
from perfagent_server.services import Services, open_services
from perfagent_server.store.statements import put
from perfagent_server.store.tables import alert, channel, delivery, rule_setting, silence, tail

HOOK = "https://example.org/hook"
_MOST_LOOKS = 30  # at what is due: odd rows go first
BATCH = 25
OF_A_SERVER = 40  # batches: a round takes longer with each run that goes on


class ByHand(Engine):
    """The rules thread is whoever calls run_once()."""

    def start(self) -> None: ...


class Posted(Posts):
    """What was sent to the channel that takes everything."""

    def has(self, run: str) -> bool:
        sent = zip(self.urls, self.deliveries, strict=True)
        return any(url == HOOK and f'"{run}"'.encode() in one.body for url, one in sent)


class Unstarted(Outbox):
    """The outbox goes by hand, too."""

    def start(self) -> None: ...


class Server:
    """clock, monotonic: the first is what jumps."""

    def __init__(
        self, services: Services, client: TestClient, clock: Clock, monotonic: Clock, folder: Path, posts: Posted
    ) -> None:
        self.posts, self.has_odd_runs = posts, False
        self.services, self.client, self.clock, self.monotonic, self.folder = services, client, clock, monotonic, folder
        self.fresh, self.seq, self.pace = 0, 0, 1.0

    def take(self, odd: Odd) -> None:
        """Gives it to the server. What is refused with a word of ours is refused well."""
        services = self.services
        if isinstance(odd.what, Frame):
            self.seq += 1
            frame = replace(odd.what, seq=self.seq)
        if odd.kind == "frame":
            with contextlib.suppress(PerfagentError):
                self._post("ingest", encode(frame), MSGPACK)
        elif odd.kind == "stored":
            self._store(frame)
        elif odd.kind == "bytes":
            self.seq += 1
            self._store(_frame("bytes", self.seq, [1.0]))
            newest = select(tail.c.id).order_by(tail.c.id.desc()).limit(1).scalar_subquery()
            broken = tail.update().where(tail.c.id == newest, tail.c.run == "bytes").values(frame=odd.what)
            services.database.write(lambda connection: connection.execute(broken))
        elif odd.kind == "row":
            self._put_row(*odd.what)
        elif odd.kind == "log":
            self._post("log", msgspec.json.encode(odd.what), {"Content-Type": "application/json"})
        elif odd.kind == "setting":
            project, rule, text = odd.what
            row = {"project": project, "rule": rule, "settings": text}
            services.database.write(lambda connection: put(connection, rule_setting, row))
            services.rules_changed()
        elif odd.kind == "file":
            file = self.folder / "rules.toml"
            file.write_bytes(odd.what)
            with contextlib.suppress(ConfigError):
                for overrides in read_rules_file(file).values():
                    Plan(rules_for(overrides))
        elif math.isnan(odd.what):
            self.pace = 1.0 - self.pace
        else:
            self.clock.at += odd.what

    def _post(self, path: str, body: bytes, headers: dict[str, str]) -> None:
        with self._own_trouble():
            answer = self.client.post(f"/api/v1/{path}", content=body, headers=headers)
            assert answer.status_code < 500, answer.text

    def _put_row(self, table: str, column: str, value: Any) -> None:
        """A row that is as usual but for one column, whose type the database is not told. Of runs and what they have, a row
        that is there."""
        self.seq += 1
        name = f"odd-{self.seq}"

        def job(connection: Connection) -> None:
            key, row = "id", name
            if table == "silence":
                connection.execute(insert(silence).values(id=name, starts=0.0, ends=9e9, created=0.0))
            elif table == "channel":
                new = channels.NewChannel(name=name, url=f"https://example.org/{name}", summaries=True)
                row, _ = channels.create(connection, new, NOW)
            elif table == "delivery":
                hook = connection.execute(select(channel.c.id).where(channel.c.url == HOOK)).scalar_one()
                its = {"id": name, "channel": hook, "event": "notice", "body": b"{}", "state": "waiting"}
                connection.execute(insert(delivery).values(**its, created=NOW, due=0.0))
            else:
                key, row = "id" if table == "run" else "run", "abcd"[self.seq % 4]
                self.has_odd_runs = True
            changed = text(f'UPDATE {table} SET "{column}" = :value WHERE {key} = :row')
            connection.execute(changed, {"value": value, "row": row})

        with contextlib.suppress(SQLAlchemyError, OverflowError):  # PostgreSQL takes no text for a number
            self.services.database.write(job)

    def _store(self, frame: Frame) -> None:
        with contextlib.suppress(Exception):  # what no table takes has no way to the rules
            self.services.database.write(
                lambda connection: self.services.store.append_in(connection, [frame], self.clock.at)  # type: ignore[attr-defined]
            )

    def round(self) -> None:
        self.monotonic.at += 5
        self.clock.at += 5 * self.pace
        while self.services.engine.run_once():
            pass
        self.services.engine.look_for_silence()
        self.services.engine.settle_outcomes()
        self.services.engine.checkpoint()
        for run in "abcd":
            with self._own_trouble():
                self.services.engine.verdict(run)

    def _own_trouble(self) -> contextlib.AbstractContextManager[None]:
        """A run whose own rows are odd may be refused in any way."""
        return contextlib.suppress(*[TypeError, ValueError, SQLAlchemyError] if self.has_odd_runs else [])

    def silence(self) -> str:
        """What is wrong after a NaN in a fresh run; empty if it is told."""
        self.fresh += 1
        run = f"fresh-{self.fresh}"
        try:
            self.round()
            self._store(_frame(run, 1, [2.0, math.nan]))
            self.services.engine.run_once()
            self.services.engine.run_once()
            self.services.watchdog.look()
            for _ in range(_MOST_LOOKS):
                self.services.outbox.send_due()
                if self.posts.has(run):
                    break
        except Exception as error:
            return f"a round failed: {error!r}"
        with self.services.database.read() as connection:
            told = connection.execute(select(alert.c.rule).where(alert.c.run == run)).scalars().all()
        if "nonfinite_loss" not in told:
            return f"the NaN raised {told}"
        if not self.posts.has(run):
            return "the alert was not sent"
        ready = self.client.get("/readyz")
        return "" if ready.status_code == 200 else ready.text


def _frame(run: str, seq: int, losses: Sequence[float]) -> Frame:
    steps = list(range(seq, seq + len(losses)))
    times = [NOW + step for step in steps]
    group = Group(steps, times, times, {"loss": list(losses)})  # type: ignore[arg-type]
    return Frame(project="p", run=run, source=f"{run}-1-0", attempt=1, rank=0, seq=seq, groups=[group])


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    place = settings_for(folder)
    services = open_services(place)
    clock, monotonic = Clock(NOW), Clock(1000.0)
    engine = ByHand(
        services.database, services.store, services.hub, clock=clock, monotonic=monotonic,
        plan_of=services.rule_settings.plan_of,
    )  # fmt: skip
    services.engine = engine
    posts = Posted()
    services.outbox = Unstarted(services.database, clock=clock, monotonic=monotonic, send=posts)
    new = channels.NewChannel(name="hook", url=HOOK)
    services.database.write(lambda connection: channels.create(connection, new, NOW))
    services.watchdog = Watchdog(
        services.database, services.store, engine, server="http://here", link="", on_deliveries=lambda: None, clock=clock,
        monotonic=monotonic,
    )  # fmt: skip
    app = create_app(place, dashboard=False, services=services)
    with TestClient(app, base_url="http://127.0.0.1:8420") as client:
        yield Server(services, client, clock, monotonic, folder, posts)


def one_by_one(folder: Path, batch: Sequence[Odd]) -> str:
    """The input that silences a new server, and how."""
    with serving(folder) as server:
        for odd in batch:
            server.take(odd)
            if said := server.silence():
                return f"{said}, after {odd!r:.3000}"
    return "only all of them together do"


def batches_of_a_night() -> int:
    return 20 if postgresql_server.is_wanted() or clickhouse_server.is_wanted() else 400


def give(folder: Path, batches: int, *, same: bool) -> None:
    """Gives a new server so many batches; same: the same ones each time."""
    count = [0]
    with serving(folder) as server:

        @settings(
            max_examples=batches, deadline=None, database=None, derandomize=same, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(st.lists(ODD, min_size=BATCH, max_size=BATCH))
        def check(batch: list[Odd]) -> None:
            count[0] += 1
            for odd in batch:
                server.take(odd)
            if said := server.silence():
                pytest.fail(f"{said}; {one_by_one(folder / f'again-{count[0]}', batch)}")

        check()
    assert count[0] >= batches


@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # 10 kB of text is one of the inputs
@pytest.mark.parametrize(
    "batches",
    [
        pytest.param(12, marks=pytest.mark.timeout(120)),
        pytest.param(0, marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
)
def test_no_input_silences_the_rules(tmp_path: Path, batches: int) -> None:
    left = batches or batches_of_a_night()
    while left > 0:
        give(tmp_path / str(left), min(left, OF_A_SERVER), same=bool(batches))
        left -= OF_A_SERVER
