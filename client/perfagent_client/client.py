"""Client and AsyncClient: one method for each thing that the API answers, typed with the shapes of perfagent.wire.

client = Client()                        # PERFAGENT_SERVER and PERFAGENT_API_KEY, else your server on this machine
for run in client.runs(state="running"):
    print(run.name, client.verdict(run.run).message)
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import httpx

from perfagent.calls.shown import show_live
from perfagent.endpoint.addresses import REFUSAL, is_on_this_machine, refuses_plain_http, wrong_scheme
from perfagent.endpoint.admin_proof import AdminProof
from perfagent.endpoint.local_server import server_address, stopped_server
from perfagent.errors import ConfigError, PerfagentError, ServerUnreachable, WireError
from perfagent.wire import Alert, Finding, Latest, LogRow, RankMatrix, RunSummary, Timing, plain
from perfagent_client.data_frame import Library
from perfagent_client.language import terminal_language
from perfagent_client.models import Comparison, RunDetails, Series, parse
from perfagent_client.samples import Samples, listed

__all__ = ["ApiError", "AsyncClient", "Client", "RunDetails"]

T = TypeVar("T")
Rank = int | Literal["all"]

_TIMEOUT = httpx.Timeout(30.0, connect=5.0)
_PAGE = 500  # runs


class ApiError(PerfagentError):
    """The server answered with an error.

    Attributes:
        status: The HTTP status.
        code: One word for programs, such as "not_found".
        message: One sentence for people.
        field: The name of the input that is wrong, or None.
    """

    def __init__(self, status: int, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.field = status, code, message, field
        self.exit_code = 2 if status in (400, 422) else 1  # what was given is wrong, and not who asked or what there is


class _Asking:
    """What both clients are: where the server is and who asks. server: without a slash at the end; api_key: a key, or a proof of
    knowing the admin token; trust_env: whether the environment's proxies are asked."""

    def __init__(self, server: str | None, api_key: str | AdminProof | None) -> None:
        self.server = server_address(server).rstrip("/")
        if not self.server.startswith(("http://", "https://")):
            raise ConfigError(f"the server's address is {self.server!r}; it must begin with http:// or https://")
        self.api_key = api_key or os.environ.get("PERFAGENT_API_KEY") or None
        # A proxy of the environment is for the outside world; it could not reach this machine's own address.
        self.trust_env = not is_on_this_machine(self.server)
        self._headers = {"Accept-Language": terminal_language()}
        if isinstance(self.api_key, str):
            self._headers["Authorization"] = f"Bearer {self.api_key}"

    @property
    def _of_http(self) -> dict[str, Any]:
        auth = self.api_key.sign if isinstance(self.api_key, AdminProof) else None
        return {"headers": self._headers, "auth": auth, "trust_env": self.trust_env, "timeout": _TIMEOUT}

    def _url(self, path: str) -> str:
        return f"{self.server}/api/v1{path}"

    def _unreachable(self, error: httpx.TransportError) -> ServerUnreachable:
        if scheme := wrong_scheme(
            self.server, error, hung_up=isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError))
        ):
            return ServerUnreachable(scheme)
        start = "start it with `perfagent up`, or set PERFAGENT_SERVER to its address"
        return ServerUnreachable(
            f"the server {self.server} does not answer ({error or type(error).__name__}): "
            f"{stopped_server(self.server) or start}"
        )


def _run_path(run: str, rest: str = "") -> str:
    return f"/runs/{quote(run, safe='')}{rest}"


def _query(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _raise(answer: httpx.Response) -> None:
    """Raises ApiError for an answer that is an error; the body must have been read."""
    if answer.is_success:
        return
    try:
        error = json.loads(answer.content)["error"]
        raise ApiError(answer.status_code, str(error["code"]), str(error["message"]), error.get("field"))
    except (ValueError, KeyError, TypeError):
        host = answer.request.url.netloc.decode()
        why = (
            REFUSAL
            if refuses_plain_http(answer.content)
            else f", and not as a perfagent server does: is {host} its address?"
        )
        problem = ApiError(answer.status_code, "unknown", f"{answer.request.url} answered {answer.status_code}{why}")
        problem.exit_code = 1  # who knows what it is that answers
        raise problem from None


def _read(answer: httpx.Response) -> Any:
    """The JSON, None for an empty answer."""
    _raise(answer)
    if not answer.content:
        return None
    try:
        return json.loads(answer.content)
    except ValueError:
        raise ServerUnreachable(f"{answer.request.url} did not answer with JSON; is that a perfagent server?") from None


def _each(kind: type[T], data: Any, key: str) -> list[T]:
    try:
        return [parse(kind, item) for item in data[key]]
    except (KeyError, TypeError):
        raise WireError(f"the server's answer has no {key!r}") from None


def _check_name(name: str, names: Sequence[str]) -> None:
    """Raises ApiError for a name that a run with series has not."""
    if not names or name in names:
        return
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ApiError(
        404, "not_found", f"this run has no series {name[:80]!r}; {hint}names() lists its {len(names)}", "name"
    )


def _no_run(run: str) -> ApiError:
    return ApiError(
        404, "not_found", f"there is no run with the id or name {run!r}; `perfagent runs` lists them", "run"
    )


class Client(_Asking):
    """Reads runs from a server, and changes them. Every call blocks.

        with Client() as client:
            for run in client.runs(state="running"):
                print(run.name, client.verdict(run.run).message)

    RUN is an id for all methods but `find`, `show` and `frame`, which also accept a name.

    Args:
        server: The address of the server; PERFAGENT_SERVER by default, else your server on this machine.
        api_key: A key with the scope read; PERFAGENT_API_KEY by default.
        transport: A transport of httpx, for tests.

    Raises:
        ApiError: The server answered with an error.
        ServerUnreachable: It did not answer, or what answered is not a perfagent server.
        WireError: Its answer does not fit the wire format.
    """

    def __init__(
        self,
        server: str | None = None,
        api_key: str | AdminProof | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(server, api_key)
        self.http = httpx.Client(**self._of_http, transport=transport)

    def request(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, Any] | None = None,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """Sends any request below /api/v1, for routes that have no method here.

        Returns:
            The JSON of the answer; None if it is empty.
        """
        try:
            answer = self.http.request(method, self._url(path), params=params, json=body, headers=headers)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        return _read(answer)

    def _table(self, path: str, **query: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.request("GET", path, params=_query(**query))
        return found

    def _list(self, path: str, key: str, **query: Any) -> list[Any]:
        return list(self._table(path, **query)[key])

    def runs(
        self,
        *,
        project: str | None = None,
        name: str | None = None,
        state: str | None = None,
        tag: str | None = None,
        limit: int | None = None,
    ) -> Iterator[RunSummary]:
        """Yields runs, newest first. Further pages are fetched when they are needed.

        Args:
            project: Only this project.
            name: Only runs of this name.
            state: Only runs in this state, such as "running".
            tag: Only runs with this tag.
            limit: At most this many.
        """
        asked = _query(project=project, name=name, state=state, tag=tag, limit=min(limit or _PAGE, _PAGE))
        return islice(self._pages_of_runs(asked), limit)

    def _pages_of_runs(self, asked: dict[str, Any]) -> Iterator[RunSummary]:
        while True:
            page = self.request("GET", "/runs", params=asked)
            yield from _each(RunSummary, page, "runs")
            if page.get("next") is None:
                return
            asked = {**asked, "cursor": page["next"]}

    def find(self, run: str) -> RunDetails:
        """The run with this id, else the newest run of this name.

        Raises:
            ApiError: There is none (404).
        """
        try:
            return self.run(run)
        except ApiError as error:
            if error.status != 404:
                raise
        for summary in self.runs(name=run, limit=1):
            return self.run(summary.run)
        raise _no_run(run)

    def run(self, run: str) -> RunDetails:
        """The run with this id.

        Raises:
            ApiError: There is none (404).
        """
        return parse(RunDetails, self._table(_run_path(run))).shown_as(self._run_html)

    def _run_html(self, run: RunDetails) -> str:
        from perfagent_client.notebook import run_html  # where a notebook asks for it

        return run_html(run, self)

    def show(self, run: str, every_s: float = 2.0) -> None:
        """Shows a run in a notebook, and updates the output until the run has ended, while the cells below it run.

        Outside of a notebook the run is printed once.

        Args:
            run: The id or name.
            every_s: Seconds between two updates.

        Raises:
            ApiError: There is no such run (404).
        """
        from perfagent_client.notebook import LiveRun

        show_live(live := LiveRun(self.find(run), self), live.has_ended, every_s)

    def change(
        self, run: str, *, name: str | None = None, tags: list[str] | None = None, notes: str | None = None
    ) -> RunDetails:
        """Changes the name, tags or notes of a run. What is not given stays."""
        return parse(RunDetails, self.request("PATCH", _run_path(run), body=_query(name=name, tags=tags, notes=notes)))

    def delete(self, run: str) -> None:
        """Deletes a run and everything that belongs to it. Needs an administrator."""
        self.request("DELETE", _run_path(run))

    def latest(self, run: str) -> dict[str, Latest]:
        """The newest value of each series of a run, by name."""
        return {name: parse(Latest, item) for name, item in self._table(_run_path(run, "/latest")).items()}

    def timing(self, run: str, *, steps: int | None = None) -> Timing:
        """Step time (seconds), throughput and shares of the phases, as every page shows them.

        Args:
            run: The id.
            steps: Of the newest so many steps; the newest 100 by default, or the whole run if it has ended.
        """
        return parse(Timing, self._table(_run_path(run, "/timing"), steps=steps))

    def compare(self, runs: Sequence[str]) -> Comparison:
        """Compares runs, or windows of runs (`RUN:FROM-TO`), with the first of them, as `perfagent compare` does.

        The fields are in docs/reference/http.md, "Comparison".
        """
        found = Comparison(self._table("/compare", runs=list(runs)))
        found.html = self._comparison_html
        return found

    def _comparison_html(self, found: Comparison) -> str:
        from perfagent_client.notebook import comparison_html

        return comparison_html(found, self)

    def names(self, run: str) -> list[str]:
        """The names of the series of a run."""
        return self._list(_run_path(run, "/names"), "names")

    def events(
        self, run: str, *, kind: str | None = None, rank: int | None = None, limit: int = 100
    ) -> list[dict[str, Any]]:
        """The newest events of a run; of those, the oldest comes first.

        Args:
            run: The id.
            kind: Only this kind; "log" is the console.
            rank: Only this rank.
            limit: At most this many.
        """
        return self._list(_run_path(run, "/events"), "events", kind=kind, rank=rank, limit=limit)

    def series(
        self,
        run: str,
        name: str,
        *,
        rank: Rank = "all",
        from_step: int | None = None,
        to_step: int | None = None,
        points: int = 1000,
    ) -> Series:
        """One series of a run, such as "loss", in at most `points` buckets of steps.

        Args:
            run: The id.
            name: The name of the series; `names` lists them.
            rank: One rank, or "all" for all of them put together.
            from_step: The first step.
            to_step: The last step.
            points: The most buckets. For exact samples use `frame` or `export`.

        Returns:
            Lists of equal length: `step`, and `mean`, `min`, `max` of the finite values, `count` and `nonfinite`, in
                `unit`. `to_frame()` makes a DataFrame.

        Raises:
            ApiError: The run has other series, and none of this name (404).
        """
        query = {"name": name, "rank": rank, "from": from_step, "to": to_step, "points": points}
        found = parse(Series, self._table(_run_path(run, "/series"), **query))
        if not found.step:
            _check_name(name, self.names(run))
        return found

    def ranks(
        self, run: str, name: str, *, from_step: int | None = None, to_step: int | None = None, points: int = 200
    ) -> RankMatrix:
        """One series of a run as a matrix of ranks × buckets of steps.

        Args:
            run: The id.
            name: The name of the series.
            from_step: The first step.
            to_step: The last step.
            points: The most buckets.
        """
        query = {"name": name, "from": from_step, "to": to_step, "points": points}
        return parse(RankMatrix, self._table(_run_path(run, "/ranks"), **query))

    def verdict(self, run: str) -> Finding:
        """The most important finding about a run, with its cause, evidence and fix."""
        return parse(Finding, self._table(_run_path(run, "/verdict")))

    def findings(self, run: str) -> list[Finding]:
        """All findings about a run, the most important first."""
        return _each(Finding, self._table(_run_path(run, "/findings")), "findings")

    def alerts(self, run: str | None = None, *, state: str | None = None, severity: str | None = None) -> list[Alert]:
        """Alerts, newest first.

        Args:
            run: Only of the run with this id.
            state: "pending", "firing" or "resolved".
            severity: "info", "warning" or "critical".
        """
        return _each(Alert, self._table("/alerts", run=run, state=state, severity=severity), "alerts")

    def history(self, alert: str) -> list[dict[str, str]]:
        """What happened to an alert, oldest first: dicts with `time`, `event`, `who` and `note`."""
        return self._list(f"/alerts/{quote(alert, safe='')}", "history")

    def ask(self, run: str, kind: str, *, ranks: list[int] | None = None, **params: Any) -> dict[str, Any]:
        """Asks the processes of a run for something. They answer later: see `commands`.

        Args:
            run: The id.
            kind: "profile", "stacks", "sampling" (other intervals), "flush", or "stop" (end the training).
            ranks: Only these ranks.
            **params: Parameters of the kind: docs/reference/wire.md, "Commands".

        Returns:
            The command as it is now.
        """
        body = {"kind": kind, **_query(ranks=ranks), **params}
        order: dict[str, Any] = self.request("POST", _run_path(run, "/commands"), body=body)
        return order

    def commands(self, run: str) -> list[dict[str, Any]]:
        """What the run was asked for, newest first, with the answers of its processes."""
        return self._list(_run_path(run, "/commands"), "commands")

    def profiles(self, run: str) -> list[dict[str, Any]]:
        """The profiles of a run, newest first, with the operators that take most time."""
        return self._list(_run_path(run, "/profiles"), "profiles")

    def operators(self, run: str, profile: str) -> dict[str, Any]:
        """One profile with all its operators."""
        return self._table(_run_path(run, f"/profiles/{quote(profile, safe='')}/operators"))

    def trace(self, run: str, profile: str) -> Iterator[bytes]:
        """Yields the gzip file of a profile's trace, in pieces."""
        with self._stream(_run_path(run, f"/profiles/{quote(profile, safe='')}")) as answer:
            yield from answer.iter_raw()

    def stacks(self, run: str, *, command: str | None = None) -> dict[str, Any]:
        """The newest stacks of a run, or those of one command: {"stacks": one for each rank, "groups": ranks at the
        same place}.
        """
        return self._table(_run_path(run, "/stacks"), command=command)

    def export(self, run: str) -> Iterator[LogRow]:
        """Yields every sample of a run. Floats are exactly those that were logged."""
        with self._stream(_run_path(run, "/export"), format="jsonl") as answer:
            for line in answer.iter_lines():
                yield parse(LogRow, json.loads(line))

    def export_bytes(self, run: str, format: str = "jsonl") -> Iterator[bytes]:  # noqa: A002 - its name in the API
        """Yields the export as the server writes it, in pieces.

        Args:
            run: The id.
            format: "jsonl", "csv" or "parquet".
        """
        with self._stream(_run_path(run, "/export"), format=format) as answer:
            yield from answer.iter_bytes()

    def frame(
        self, runs: str | Sequence[str], names: str | Sequence[str] | None = None, *, library: Library | None = None
    ) -> Any:
        """Every sample of runs, exactly as it was logged, as a pandas or polars DataFrame with one row for each sample.

        The columns are `run`, `run_name`, `name`, `rank`, `step`, `time` (UTC) and `value`. For one column for each
        series, of one run and rank, in pandas: `frame.pivot(index="step", columns="name", values="value")`.

        Args:
            runs: One or more ids or names.
            names: Only these series.
            library: "pandas" or "polars"; by default pandas if it is installed, else polars.

        Raises:
            ApiError: None of the runs has a series of this name (404).
            ResourceError: The library is not installed.
        """
        samples, found = Samples(listed(names)), [self.find(word) for word in listed(runs)]
        for run in found:
            with self._stream(_run_path(run.run, "/export"), name=samples.wanted) as answer:
                for line in answer.iter_lines():
                    samples.add(run, line)
        for name in samples.missing():
            _check_name(name, [known for run in found for known in self.names(run.run)])
        return samples.frame(library)

    @contextlib.contextmanager
    def _stream(self, path: str, **params: Any) -> Iterator[httpx.Response]:
        """An answer that is read in pieces."""
        has_begun = False
        try:
            with self.http.stream("GET", self._url(path), params=params) as answer:
                if not answer.is_success:
                    answer.read()
                _raise(answer)
                has_begun = True
                yield answer
        except httpx.TransportError as error:
            broken = f"{self.server} broke off in the middle of its answer: {error}"
            raise (ServerUnreachable(broken) if has_begun else self._unreachable(error)) from error

    def log(
        self, run: str, metrics: dict[str, float], *, step: int | None = None, project: str = "default", rank: int = 0,
        time: float | None = None, idempotency_key: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Sends one row of samples to a run, which begins if it does not exist. For programs that are no training.

        Args:
            run: The name of the run.
            metrics: Names and values.
            step: The step; one more than the last by default.
            project: The project of the run.
            rank: The rank.
            time: Seconds since 1970; now by default.
            idempotency_key: A second request with the same key is not stored again.
        """
        body = _query(project=project, run=run, step=step, metrics=plain(metrics), rank=rank, time=time)
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else None
        reply: dict[str, Any] = self.request("POST", "/log", body=body, headers=headers)
        return reply

    def close(self) -> None:
        """Closes the connection."""
        self.http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_Asking):
    """The reading methods of Client, for asyncio programs.

        async with AsyncClient() as client:
            async for run in client.runs():
                print(run.name)

    Args:
        server: The address of the server, as for Client.
        api_key: A key with the scope read, as for Client.
        transport: A transport of httpx, for tests.
    """

    def __init__(
        self,
        server: str | None = None,
        api_key: str | AdminProof | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(server, api_key)
        self.http = httpx.AsyncClient(**self._of_http, transport=transport)

    def authorization(self, target: str) -> dict[str, str]:
        """The header with the credentials of a GET of this path, for a WebSocket."""
        key = self.api_key
        return {"Authorization": key.header("GET", target)} if isinstance(key, AdminProof) else self._headers

    async def request(self, method: str, path: str, *, params: dict[str, Any] | None = None, body: Any = None) -> Any:
        """As Client.request."""
        try:
            answer = await self.http.request(method, self._url(path), params=params, json=body)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        return _read(answer)

    async def _get(self, path: str, **query: Any) -> Any:
        return await self.request("GET", path, params=_query(**query))

    async def runs(
        self, *, project: str | None = None, name: str | None = None, state: str | None = None, tag: str | None = None
    ) -> AsyncIterator[RunSummary]:
        """Yields runs, newest first, as Client.runs."""
        asked = _query(project=project, name=name, state=state, tag=tag, limit=_PAGE)
        while True:
            page = await self.request("GET", "/runs", params=asked)
            for row in _each(RunSummary, page, "runs"):
                yield row
            if page.get("next") is None:
                return
            asked["cursor"] = page["next"]

    async def run(self, run: str) -> RunDetails:
        """As Client.run."""
        return parse(RunDetails, await self._get(_run_path(run)))

    async def find(self, run: str) -> RunDetails:
        """As Client.find."""
        try:
            return await self.run(run)
        except ApiError as error:
            if error.status != 404:
                raise
        async for summary in self.runs(name=run):
            return await self.run(summary.run)
        raise _no_run(run)

    async def latest(self, run: str) -> dict[str, Latest]:
        """As Client.latest."""
        return {name: parse(Latest, item) for name, item in (await self._get(_run_path(run, "/latest"))).items()}

    async def timing(self, run: str, *, steps: int | None = None) -> Timing:
        """As Client.timing."""
        return parse(Timing, await self._get(_run_path(run, "/timing"), steps=steps))

    async def series(
        self,
        run: str,
        name: str,
        *,
        rank: Rank = "all",
        from_step: int | None = None,
        to_step: int | None = None,
        points: int = 1000,
    ) -> Series:
        """As Client.series."""
        query = {"name": name, "rank": rank, "from": from_step, "to": to_step, "points": points}
        found = parse(Series, await self._get(_run_path(run, "/series"), **query))
        if not found.step:
            _check_name(name, await self.names(run))
        return found

    async def frame(
        self, runs: str | Sequence[str], names: str | Sequence[str] | None = None, *, library: Library | None = None
    ) -> Any:
        """As Client.frame."""
        samples, found = Samples(listed(names)), [await self.find(word) for word in listed(runs)]
        for run in found:
            url = self._url(_run_path(run.run, "/export"))
            try:
                async with self.http.stream("GET", url, params={"name": samples.wanted}) as answer:
                    if not answer.is_success:
                        await answer.aread()
                    _raise(answer)
                    async for line in answer.aiter_lines():
                        samples.add(run, line)
            except httpx.TransportError as error:
                raise self._unreachable(error) from error
        for name in samples.missing():
            _check_name(name, [known for run in found for known in await self.names(run.run)])
        return samples.frame(library)

    async def names(self, run: str) -> list[str]:
        """As Client.names."""
        return list((await self._get(_run_path(run, "/names")))["names"])

    async def verdict(self, run: str) -> Finding:
        """As Client.verdict."""
        return parse(Finding, await self._get(_run_path(run, "/verdict")))

    async def alerts(
        self, run: str | None = None, *, state: str | None = None, severity: str | None = None
    ) -> list[Alert]:
        """As Client.alerts."""
        return _each(Alert, await self._get("/alerts", run=run, state=state, severity=severity), "alerts")

    async def aclose(self) -> None:
        """Closes the connection."""
        await self.http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
