"""The rows of the fault matrix about alerts: receivers that fail, servers killed with an alert on its way, many ranks at
once, silence. Each function is one row, on a real server process, unless it takes days: then with a clock that is moved.

The oracle is the receiver's own list of requests.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from builders import Delivery, Receiver, ServerProcess, free_port, server_process, until, web
from data_folder import looking_into, place_of
from faults.outcome import Outcome
from sqlalchemy import func, insert, select

from perfagent.wire import Event, Finding, Frame, Group, encode
from perfagent_server.alerts import channels, tables
from perfagent_server.alerts.batches import Batch, what_is_due
from perfagent_server.alerts.outbox import Outbox
from perfagent_server.alerts.state_machine import Change
from perfagent_server.database import Database, open_database
from perfagent_server.settings import Settings
from perfagent_server.store.tables import alert, delivery
from perfagent_server.store.tables import run as runs

Say = Callable[[str], None]
BEGIN = 1_700_000_000.0


# ---- W01 and W02: one id, none missing


def nan_frame(run: str, *, steps: int = 20, rank: int = 0) -> bytes:
    """What an agent sends for a rank of a run whose loss is NaN at its last step."""
    now = time.time()
    losses = [2.0 - 0.01 * step for step in range(1, steps)] + [float("nan")]
    group = Group(
        list(range(1, steps + 1)),
        [now - steps + i for i in range(steps)],
        [float(i) for i in range(steps)],
        {"loss": losses},
    )
    begun = Event(kind="state", time=now - steps, data={"state": "running"})
    return encode(
        Frame(
            project="faults",
            run=run,
            source=f"source-{run}-{rank}",
            attempt=1,
            rank=rank,
            seq=1,
            groups=[group],
            events=[begun],
        )
    )


def post(server: ServerProcess, frame: bytes) -> None:
    answer = web().post(
        f"{server.url}/api/v1/ingest",
        content=frame,
        headers={"Content-Type": "application/x-msgpack"},
        timeout=30.0,
    )
    assert answer.status_code == 200, answer.text


def killed_between_ack_and_judgment(folder: Path, *, trials: int, say: Say = print) -> Outcome:
    """kill -9 right after the ack of a NaN: the alert fires once after the restart, with one webhook id."""
    good = gaps = 0
    with Receiver() as receiver:
        server = ServerProcess(folder / "server", env={"PERFAGENT_WEBHOOK_ALLOW": receiver.address}).start()
        try:
            server.admin("POST", "/channels", {"name": "faults", "kind": "webhook", "url": receiver.url})
            for number in range(1, trials + 1):
                run = f"gap-{number}"
                frame = nan_frame(run)
                post(server, frame)
                server.kill()
                gaps += _rows_on_disk(server, run)[0] == 0
                server.start()

                def fired(run: str = run) -> list[Any]:
                    return [d for d in receiver.of_type("alert.firing") if d.json["data"]["run"] == run]

                try:
                    until(fired, within_s=30.0)
                except AssertionError:
                    say(f"  trial {number}: no webhook")
                    continue
                alerts = server.get(f"/runs/{run}/alerts")["alerts"]
                ids = {delivery.headers["webhook-id"] for delivery in fired()}
                good += len(alerts) == 1 and alerts[0]["rule"] == "nonfinite_loss" and len(ids) == 1
                say(f"  trial {number}/{trials}: {len(alerts)} alert, {len(ids)} webhook id")
        finally:
            server.stop()
    figures = f"{gaps} of {trials} kills hit before the alert was on disk"
    return Outcome(
        "W02", "server killed between the ack and the judgment of a NaN: the alert fires, once", good, trials, figures
    )


def receiver_fails_and_server_dies(
    folder: Path, *, alerts: int, kills: int, within_s: float = 400.0, say: Say = print
) -> Outcome:
    """A receiver that refuses every third request, and kill -9 of the server in between: one id per alert, none
    missing."""
    with Receiver(lambda number: 503 if number % 3 == 0 else 200) as receiver:
        server = ServerProcess(folder / "server", env={"PERFAGENT_WEBHOOK_ALLOW": receiver.address}).start()
        try:
            server.admin("POST", "/channels", {"name": "faults", "kind": "webhook", "url": receiver.url})
            for number in range(1, alerts + 1):
                post(server, nan_frame(f"hook-{number}"))
                if number % max(1, alerts // kills) == 0:
                    time.sleep(random.Random(number).uniform(0.0, 0.3))  # before, during or after a delivery
                    server.kill()
                    server.start()

            def accepted() -> dict[str, set[str]]:
                """run -> ids of the deliveries that were answered with success."""
                ids: dict[str, set[str]] = {}
                for delivery in receiver.of_type("alert.firing"):
                    if delivery.status == 200:
                        ids.setdefault(delivery.json["data"]["run"], set()).add(delivery.headers["webhook-id"])
                return ids

            try:
                until(lambda: len(accepted()) == alerts, within_s=within_s, every_s=0.2)
            except AssertionError:
                say(f"  only {len(accepted())} of {alerts} alerts arrived")
            attempted: dict[str, set[str]] = {}
            for delivery in receiver.of_type("alert.firing"):
                attempted.setdefault(delivery.json["data"]["run"], set()).add(delivery.headers["webhook-id"])
            arrived = accepted()
            good = sum(
                len(attempted.get(f"hook-{n}", ())) == 1 and f"hook-{n}" in arrived for n in range(1, alerts + 1)
            )
            requests = len(receiver.of_type("alert.firing"))
            refused = sum(delivery.status == 503 for delivery in receiver.deliveries)
        finally:
            server.stop()
    figures = (
        f"{requests} requests, {refused} refused, {kills} kills; "
        f"every repeat carried the id of the first try: {good == alerts}"
    )
    name = "receiver refuses every third request, server killed in between: one id per alert, none missing"
    return Outcome("W01", name, good, alerts, figures)


# ---- W02: four points between "fired" and "2xx seen"

POINTS = ("acknowledged", "written", "sent", "answered")
"""When the server is killed: after it acknowledged the NaN; when alert and delivery are on its disk; when the receiver
has the message and has not answered; when the receiver has answered."""


def killed_at_four_points(folder: Path, *, kills: int, say: Say = print) -> Outcome:
    """kill -9 at each of four points, `kills` times each: every alert arrives under one id, and twice only where the
    message was out before the kill."""
    good, repeated = 0, dict.fromkeys(POINTS, 0)
    port = free_port()
    server = ServerProcess(folder / "server", env={"PERFAGENT_WEBHOOK_ALLOW": f"127.0.0.1:{port}"}).start()
    try:
        server.admin("POST", "/channels", {"name": "faults", "kind": "webhook", "url": f"http://127.0.0.1:{port}/hook"})
        for number in range(kills):
            for point in POINTS:
                requests = _killed_at(point, server, port, f"{point}-{number}")
                ids = {one.headers["webhook-id"] for one in requests}
                arrived = any(one.status == 200 for one in requests)
                alerts = server.get(f"/runs/{point}-{number}/alerts")["alerts"]
                again = len(requests) > 1
                repeated[point] += again
                may_repeat = point in ("sent", "answered")
                good += arrived and len(ids) == 1 and len(alerts) == 1 and (may_repeat or not again)
            say(f"  {len(POINTS) * (number + 1)}/{len(POINTS) * kills} kills, {good} good, sent again: {repeated}")
    finally:
        server.stop()
    name = "server killed at each of four points between the ack of a NaN and the receiver's 2xx: one id an alert, none missing"
    figures = f"{kills} kills at each point; sent again under the first id: " + ", ".join(
        f"{count} {point}" for point, count in repeated.items()
    )
    return Outcome("W02", name, good, len(POINTS) * kills, figures)


def _killed_at(point: str, server: ServerProcess, port: int, run: str) -> list[Delivery]:
    """The requests about the run's alert, before and after the kill."""
    once, killed = threading.Lock(), threading.Event()

    def kill(_number: int) -> None:
        if once.acquire(blocking=False):
            server.kill()
            killed.set()

    if point in ("acknowledged", "written"):  # nobody listens: nothing can be sent
        post(server, nan_frame(run))
        if point == "written":
            until(lambda: _rows_on_disk(server, run) == (1, 1), every_s=0.002, why="no alert was written")
        kill(0)
        hooks: dict[str, Callable[[int], None]] = {}
    else:
        hooks = {"got" if point == "sent" else "answered": kill}
    with Receiver(port=port, **hooks) as receiver:
        if hooks:
            post(server, nan_frame(run))
            until(killed.is_set, within_s=30.0, why="no message came")
        server.start()

        def told() -> list[Delivery]:
            return [one for one in receiver.of_type("alert.firing") if one.json["data"]["run"] == run]

        until(lambda: any(one.status == 200 for one in told()), within_s=60.0, why=f"{run} was never told")
        # until the server knows that it arrived: what it would send again comes before
        until(lambda: _delivered(server, run), within_s=60.0, why=f"{run} stayed on its way")
        return told()


def _delivered(server: ServerProcess, run: str) -> bool:
    alerts = server.get(f"/runs/{run}/alerts")["alerts"]
    sent = [one for alert in alerts for one in server.get(f"/deliveries?alert={alert['id']}")["deliveries"]]
    return bool(sent) and all(one["state"] == "delivered" for one in sent)


# ---- W03: one notification


def many_ranks_at_once(folder: Path, *, ranks: int) -> Outcome:
    """NaN on every rank in one step, each rank a process of its own: one alert, one notification."""
    with _watched(folder) as (server, receiver):
        for rank in range(ranks):
            post(server, nan_frame("wide", rank=rank))
        until(lambda: receiver.of_type("alert.firing"), within_s=60.0, why="nothing was told")
        until(lambda: _judged(server), within_s=120.0, why="the rules did not catch up")
        time.sleep(3.0)  # for what must not come
        alerts = server.get("/runs/wide/alerts")["alerts"]
        told = receiver.of_type("alert.firing")
        named = alerts[0]["ranks"] if alerts else []
    figures = f"{len(alerts)} alert that names {len(named)} ranks, {len(told)} notification"
    name = f"NaN on {ranks} ranks in one step: one alert, one notification"
    return Outcome("W03", name, int(len(alerts) == len(told) == 1 and len(named) == ranks), 1, figures)


def flapping_and_restarts(folder: Path, *, seconds: float, restarts: int) -> list[Outcome]:
    """A loss that is NaN again and again; then the server is killed and started again while the alert fires."""
    with _watched(folder) as (server, receiver):
        job, turns, end = _Job(server, "flaps"), 0, time.monotonic() + seconds
        while time.monotonic() < end:
            job.log([float("nan")] * 2)
            job.log([2.0] * 30)
            turns += 1
            time.sleep(0.25)
        until(lambda: _judged(server), within_s=60.0)
        time.sleep(2.0)
        told = receiver.of_type("alert.firing")
        ids = {one.json["data"]["alert"]["id"] for one in told}
        flapped = Outcome(
            "W03", "a loss that is NaN and finite by turns: one notification", int(len(told) == len(ids) == 1), 1,
            f"{turns} turns in {seconds:.0f} s: {len(told)} notification",
        )  # fmt: skip
        job = _Job(server, "stays")
        job.log([2.0] * 20 + [float("nan")] * 5)
        until(lambda: _delivered(server, "stays"), within_s=30.0)  # a kill before that may have it sent again
        for _ in range(restarts):
            server.kill()
            server.start()
            job.log([float("nan")] * 5)
        until(lambda: _judged(server), within_s=60.0)
        job.log([2.0] * 200)
        until(lambda: _told(receiver, "alert.resolved", "stays"), within_s=60.0, why="it was never resolved")
        time.sleep(2.0)
        firing, over = (_told(receiver, kind, "stays") for kind in ("alert.firing", "alert.resolved"))
    stays = Outcome(
        "W03", "server killed and started again while an alert fires: reported once, and resolved once",
        int(len(firing) == len(over) == 1), 1, f"{restarts} kills: {len(firing)} firing, {len(over)} resolved",
    )  # fmt: skip
    return [flapped, stays]


# ---- W04: the receiver is away for days, by a clock that is moved


def receiver_away(folder: Path, *, alerts: int, hours: float = 72.0) -> Outcome:
    """Alerts fire all the while nobody listens; then somebody does: each arrives, once."""
    clock, moments = _Clock(BEGIN), random.Random(4)
    fires = sorted(moments.uniform(0.0, hours * 3600.0) for _ in range(alerts))
    port = free_port()
    database = open_database(Settings(**place_of(folder)))
    try:
        _channel_and_run(database, f"http://127.0.0.1:{port}/hook")
        outbox = _ByHand(database, [f"127.0.0.1:{port}"], clock=clock)
        for number, after_s in enumerate(fires):
            outbox.work_until(BEGIN + after_s)
            _fire(database, f"alert {number}", clock.at)
        outbox.work_until(BEGIN + hours * 3600.0)
        tries = outbox.counters["tries"]
        with Receiver(port=port) as receiver:
            outbox.work_until(clock.at + 24 * 3600.0)
            arrived = [one.json["data"]["alert"]["id"] for one in receiver.of_type("alert.firing")]
        with database.read() as connection:
            enabled = all(row["enabled"] for row in channels.all_channels(connection))
    finally:
        database.close()
    good = sum(arrived.count(f"alert {number}") == 1 for number in range(alerts))
    figures = f"{tries} tries in vain; channel still enabled: {enabled}"
    name = f"receiver away for {hours:.0f} h (moved clock): every alert of that time arrives once it is back"
    return Outcome("W04", name, good if enabled else 0, alerts, figures)


# ---- W05: silence


def heartbeat_of_the_server(folder: Path, *, beats: int) -> Outcome:
    """A heartbeat channel is called in its interval; not while the server is dead; again when it lives."""
    every_s = 10.0  # the shortest there is
    with Receiver() as receiver:
        server = ServerProcess(folder / "server", env={"PERFAGENT_WEBHOOK_ALLOW": receiver.address}).start()
        try:
            server.admin("POST", "/channels", {"kind": "heartbeat", "url": receiver.url, "every_s": every_s})
            until(lambda: len(receiver.deliveries) >= beats, within_s=(beats + 2) * every_s, why="no heartbeat came")
            gaps = [b.received - a.received for a, b in zip(receiver.deliveries, receiver.deliveries[1:], strict=False)]
            server.kill()
            before = len(receiver.deliveries)
            time.sleep(1.5 * every_s)
            silent = len(receiver.deliveries) == before
            server.start()
            until(lambda: len(receiver.deliveries) > before, within_s=2 * every_s, why="it did not beat again")
        finally:
            server.stop()
    longest = max(gaps, default=0.0)
    good = silent and longest <= every_s + 6.0  # it is looked at every five seconds
    figures = f"longest gap {longest:.1f} s; silent while the server was dead: {silent}"
    return Outcome("W05", f"a heartbeat every {every_s:.0f} s as long as the server lives", int(good), 1, figures)


def silent_agent(folder: Path) -> Outcome:
    """An agent falls silent: the run is lost within a minute, which is told once; it goes on, and that is over."""
    with _watched(folder) as (server, receiver):
        job = _Job(server, "silent", heartbeat=True)
        begin = time.monotonic()
        job.log([2.0] * 20)
        until(lambda: server.get("/runs/silent")["state"] == "lost", within_s=90.0, every_s=0.5, why="it was not lost")
        lost_after_s = time.monotonic() - begin
        until(lambda: _told(receiver, "alert.firing", "silent"), within_s=30.0, why="nobody was told")
        job.log([2.0] * 20)
        until(lambda: _told(receiver, "alert.resolved", "silent"), within_s=60.0, why="it was never over")
        state = server.get("/runs/silent")["state"]
        rules = [one.json["data"]["alert"]["rule"] for one in receiver.of_type("alert.firing")]
    good = rules == ["lost_contact"] and state == "running" and lost_after_s <= 60.0
    figures = f"lost after {lost_after_s:.0f} s; {len(rules)} notification; {state} again"
    return Outcome("W05", "an agent that falls silent is lost, reported once, and found again", int(good), 1, figures)


# ---- what the rows share


@contextmanager
def _watched(folder: Path) -> Iterator[tuple[ServerProcess, Receiver]]:
    """A server with a webhook."""
    with Receiver() as receiver, server_process(folder / "server", PERFAGENT_WEBHOOK_ALLOW=receiver.address) as server:
        server.admin("POST", "/channels", {"name": "faults", "kind": "webhook", "url": receiver.url})
        yield server, receiver


def _told(receiver: Receiver, kind: str, run: str) -> list[Delivery]:
    return [one for one in receiver.of_type(kind) if one.json["data"]["run"] == run]


def _judged(server: ServerProcess) -> bool:
    """Whether the rules have seen all that was stored."""
    return not server.get("/self")["counters"]["rules"]["lag_frames"]


class _Job:
    """Sends frames of a run as an agent does, with the clock of now."""

    def __init__(self, server: ServerProcess, run: str, *, heartbeat: bool = False) -> None:
        self._server, self._run, self._seq, self._step = server, run, 0, 0
        self._state = {"state": "running", "heartbeat": heartbeat}

    def log(self, losses: list[float]) -> None:
        now, self._seq = time.time(), self._seq + 1
        steps = list(range(self._step + 1, self._step + len(losses) + 1))
        self._step = steps[-1]
        times = [now - 1e-3 * (len(losses) - place) for place in range(len(losses))]
        events = [Event(kind="state", time=now, data=self._state)] if self._seq == 1 else []
        group = Group(steps, times, times, {"loss": losses})
        made = Frame(
            project="faults", run=self._run, source=f"source-{self._run}", attempt=1, rank=0, seq=self._seq,
            groups=[group], events=events, sent=now,
        )  # fmt: skip
        post(self._server, encode(made))


class _Clock:
    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


class _ByHand(Outbox):
    """An outbox whose time is moved: each try is made when it is due, on this thread."""

    def _launch(self, batch: Batch) -> None:
        self._deliver(batch)

    def work_until(self, end: float) -> None:
        clock: Any = self._clock
        while True:
            with self._database.read() as connection:
                due = what_is_due(connection, clock.at, {})
            for batch in due.batches:
                self._launch(batch)
            if due.batches:
                continue
            if due.following is None or due.following > end:
                break
            clock.at = max(clock.at, float(due.following))
        clock.at = max(clock.at, end)


def _channel_and_run(database: Database, url: str) -> None:
    values = {"id": "r", "project": "p", "name": "gpt", "state": "running", "started": BEGIN, "updated": BEGIN}
    database.write(lambda connection: connection.execute(insert(runs).values(**values)) and None)
    new = channels.NewChannel(name="hook", url=url)
    database.write(lambda connection: channels.create(connection, new, BEGIN))


def _fire(database: Database, name: str, at: float) -> None:
    found = Finding(rule="nonfinite_loss", severity="critical", message=name, ranks=[0])
    change = Change("fire", name, found, 1, at)
    database.write(lambda connection: tables.apply(connection, [("r", change)], at, "http://here/run/{}".format))


def _rows_on_disk(server: ServerProcess, run: str) -> tuple[int, int]:
    """Alerts of a run and their deliveries, in the database of a server, dead or alive."""
    with looking_into(server.folder / "server-data") as connection:
        counts = [
            connection.execute(select(func.count()).select_from(table).where(table.c.run == run)).scalar_one()
            for table in (alert, delivery)
        ]
    return counts[0], counts[1]
