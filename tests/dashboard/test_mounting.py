"""What a browser gets from the mounted dashboard before any script runs: assets, policy, and what stays the API's."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import pytest
from api_builders import api
from builders import until
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.responses import JSONResponse

from perfagent_dashboard import app as dashboard


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with api(tmp_path, dashboard=True) as running:
        yield running


def test_what_a_page_loads_is_ours_compressed_and_kept(client: TestClient) -> None:
    page = client.get("/run/some-run").text  # a deep link is the first request
    sources = re.findall(r'(?:src|href)="([^"]+)"', page)
    for name in ("page.css", "page-en.js", "dash-renderer", "plotly.v"):
        assert len([source for source in sources if name in source]) == 1, name
    assert (
        "/* Icons" in client.get("/assets/page.css").text and "class RunBoard" in client.get("/assets/page-en.js").text
    )
    for source in sources:
        assert re.match("/[^/]|data:image/svg|/$", source), source
        if re.search(r"\.(js|css)$", source):
            answer = client.get(source, headers={"Accept-Encoding": "br"})
            assert answer.status_code == 200, source
            assert "immutable" in answer.headers["cache-control"], source
            assert answer.headers.get("content-encoding") == "br" or len(answer.content) < 1024, source
    assert client.get("/assets/10-style.css").headers["cache-control"] == "no-cache"
    assert client.get("/assets/../app.py").status_code == 404
    assert client.get("/_dash-component-suites/plotly/__init__.py").status_code == 404


def test_what_is_there_is_found_and_the_rest_is_a_404_page(client: TestClient) -> None:
    run = client.post("/api/v1/log", json={"run": "a name/with a slash", "metrics": {"loss": 1.0}}).json()["run"]
    for path in ("/", "/runs", "/alerts", "/settings", "/docs", "/healthz", f"/run/{run}", f"/run/{run}/"):
        assert (client.get(path).status_code, client.head(path).status_code) == (200, 200), path
    for path in ("/alrts", "/run", "/run/", "/run/no-such-run", "/run/a/b", "/favicon.ico"):
        answer = client.get(path)
        assert answer.status_code == 404, path
        assert "page-en.js" in answer.text  # the page that says so, and leads back
    answer = client.get("/api/v1/rnus")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_no_script_may_come_from_elsewhere_or_stand_in_the_page(client: TestClient) -> None:
    policy = client.get("/run/x").headers["content-security-policy"]
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'self'"
    assert "unsafe" not in directives["script-src"]
    assert "http" not in policy


def test_the_server_draws_the_bar_and_the_verdict_of_a_run(client: TestClient) -> None:
    rows = [
        {"run": "<b>odd</b>", "step": step, "metrics": {"loss": "NaN" if step > 40 else 1.0}} for step in range(1, 51)
    ]
    run = client.post("/api/v1/log", json=rows).json()["run"]
    verdict = f"/api/v1/runs/{run}/verdict"
    until(lambda: client.get(verdict).json()["rule"] == "nonfinite_loss", within_s=20.0)
    page = client.get(f"/run/{run}").text
    assert len(page.encode()) < 30_000
    body = page.split("</head>")[1].split("<footer>")[0]
    assert 'href="/alerts"' in body and "<h1>&lt;b&gt;odd&lt;/b&gt;</h1>" in body
    assert escape(client.get(verdict).json()["title"].split("`")[0]) in body


def test_the_modules_of_the_pages_share_no_name(client: TestClient) -> None:
    script = client.get("/assets/page-en.js").text
    names = re.findall(r"^(?:async )?(?:function\*?|const|let|class) +([\w$]+)", script, re.MULTILINE)
    assert len(names) > 150 and [name for name, count in Counter(names).items() if count > 1] == []


def test_two_apps_of_one_process_both_have_callbacks_and_pages() -> None:
    async def anything(*_asked: object) -> Any:
        return "any"

    apps = []
    for _ in range(2):
        server = FastAPI()
        server.get("/api/v1/{path:path}")(lambda path: JSONResponse({}, 404))
        apps.append((dashboard.mount_on(server, server_url="", known_run=anything, run_named=anything), server))
    for mounted, server in apps:
        assert "_pages_content.children" in " ".join(mounted.callback_map)
        with TestClient(server) as started:  # Dash adds a catch-all of its own when the server starts
            assert "page-en.js" in started.get("/run/a").text
            assert [started.get(path).status_code for path in ("/", "/run/a", "/elsewhere")] == [200, 200, 404]


def test_the_page_of_a_name_leads_to_the_newest_run_of_that_name(client: TestClient) -> None:
    def log(run: str, project: str = "vision") -> str:
        answer = client.post("/api/v1/log", json={"run": run, "project": project, "metrics": {"loss": 1.0}})
        return str(answer.json()["run"])

    first, other = log("resnet 50/a"), log("other")
    second = log("resnet 50/a", "speech")
    assert len({first, second, other}) == 3
    for path in ("/run/resnet 50/a", "/run/resnet%2050%2Fa/", "/run/resnet 50/a?from=3"):
        answer = client.get(path, follow_redirects=False)
        query = "?from=3" if "?" in path else ""
        assert (answer.status_code, answer.headers["location"]) == (307, f"/run/{second}{query}"), path
        assert answer.headers["cache-control"] == "no-store"
    assert client.get("/run/other", follow_redirects=True).url.path == f"/run/{other}"
    assert client.get(f"/run/{first}", follow_redirects=False).status_code == 200, "an id is itself"


def test_a_name_is_not_told_to_whom_the_pages_are_closed(tmp_path: Path) -> None:
    with api(tmp_path, dashboard=True, auth="required") as closed:
        headers = {"Accept": "text/html"}
        for path in ("/run/there", "/run/nowhere"):
            answer = closed.get(path, headers=headers, follow_redirects=False)
            assert (answer.status_code, answer.headers["location"]) == (303, f"/login?next={path}")


def test_each_page_names_only_the_libraries_that_it_uses(client: TestClient) -> None:
    def used(path: str) -> set[str]:
        sources = re.findall(r'(?:src|href)="([^"]+)"', client.get(path).text)
        return {name for name in ("dash_ag_grid", "plotly.v", "dash_table") for source in sources if name in source}

    uses = {path: used(path) for path in ("/", "/runs", "/run/x", "/alerts", "/settings")}
    assert uses == {"/": set(), "/runs": {"dash_ag_grid"}, "/run/x": {"plotly.v"}, "/alerts": set(), "/settings": set()}
