"""The server, the key and the clock: judges what the server answers."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from perfagent.endpoint.addresses import is_on_this_machine
from perfagent_client.doctor.checks import Check

if TYPE_CHECKING:
    import httpx

__all__ = ["ServerAnswer", "ask_server", "clock", "key", "server"]

TIMEOUT_S = 3.0
CLOCK_S, CLOCK_FAR_S = 5.0, 300.0


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """What two requests to a server found. error: why it did not answer; status: of /openapi.json; version: of a
    perfagent server; who, may: of the key; session_status: of the question who we are; date: of its answer, Unix
    seconds; asked: the middle of that request by our own clock."""

    error: str = ""
    status: int = 0
    version: str | None = None
    session_status: int = 0
    who: str = ""
    may: tuple[str, ...] = ()
    date: float | None = None
    asked: float = 0.0


def ask_server(address: str, api_key: str | None) -> ServerAnswer:
    """Asks the server; takes a few seconds at most, and raises nothing."""
    import time

    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=not is_on_this_machine(address)) as client:
            document = client.get(f"{address}/openapi.json")
            before = time.time()
            session = client.get(f"{address}/api/v1/session", headers=headers)
            asked = (before + time.time()) / 2
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return ServerAnswer(error=" ".join(f"{type(error).__name__}: {error}".split())[:200])
    described, answer = _content(document), _content(session)
    ours = "/api/v1/ingest" in described.get("paths", ())
    return ServerAnswer(
        status=document.status_code, version=str(described["info"]["version"]) if ours else None,
        session_status=session.status_code, who=str(answer.get("who", "")), may=tuple(map(str, answer.get("may", ()))),
        date=_date(session.headers.get("date")), asked=asked,
    )  # fmt: skip


def _content(answer: httpx.Response) -> dict[str, Any]:
    """Empty where the request failed, or the answer is none of perfagent's."""
    with contextlib.suppress(ValueError):
        content = answer.json()
        return content if answer.status_code == 200 and isinstance(content, dict) else {}
    return {}


def server(address: str, found: ServerAnswer, ours: str, *, own: str | None = None, stopped: str = "") -> Check:
    """ours: the version of this package. own: where this user's server on this machine listens; stopped: what to say of
    one that was killed."""
    if found.error:
        step = (
            stopped
            or "start one: perfagent up. Elsewhere: set PERFAGENT_SERVER to its address, and look at the firewall"
        )
        if own is not None:
            step = f"your server on this machine listens at {own}: unset PERFAGENT_SERVER, and jobs find it"
        return Check("server", "problem", f"{address} does not answer ({found.error})", step)
    if found.version is None:
        step = "set PERFAGENT_SERVER to the address of a perfagent server"
        text = f"what answers at {address} is no perfagent server (status {found.status})"
        return Check("server", "problem", text, step)
    if found.version.split(".")[:2] != ours.split(".")[:2]:
        step = "install the same version on both sides, the server first"
        return Check("server", "warning", f"{address} answers, version {found.version}; here it is {ours}", step)
    return Check("server", "ok", f"{address} answers, version {found.version}")


def key(given: bool, found: ServerAnswer) -> Check:
    """given: whether this environment has a key."""
    make = "`perfagent keys create ingest` on the server's machine makes one; set PERFAGENT_API_KEY to it"
    if found.error or found.version is None:
        is_set = "set" if given else "not set"
        return Check("key", "warning", f"{is_set}, and not tried: no server answers", "see the line of the server")
    if found.session_status == 429:
        return Check(
            "key", "warning", "the server refused too many wrong keys from here", "wait a minute and try again"
        )
    if found.session_status != 200:
        text = f"PERFAGENT_API_KEY is unknown here, revoked or expired (status {found.session_status})"
        return Check("key", "problem", text, make)
    may = f"may {' and '.join(found.may) or 'nothing'}"
    if "ingest" not in found.may:
        text = f"{found.who}: {may}, but not send" if given else "not set, and this server asks for one"
        return Check("key", "problem", text, make)
    return Check("key", "ok", f"valid: {found.who}, {may}" if given else f"not set, and not needed: anyone {may}")


def clock(found: ServerAnswer) -> Check:
    """By the Date of the server's answer, which has whole seconds."""
    if found.date is None:
        return Check("clock", "warning", "not compared: no server answers", "see the line of the server")
    ahead = found.asked - (found.date + 0.5)
    if abs(ahead) <= CLOCK_S:
        return Check("clock", "ok", "agrees with the server's within 5 s")
    text = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    step = "set both clocks by NTP (timedatectl set-ntp true): charts over time and rules that wait are off by as much"
    return Check("clock", "problem" if abs(ahead) > CLOCK_FAR_S else "warning", text, step)


def _date(header: str | None) -> float | None:
    try:
        return parsedate_to_datetime(header).timestamp() if header else None
    except (ValueError, OverflowError):
        return None
