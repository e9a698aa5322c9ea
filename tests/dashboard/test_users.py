"""Users in the browser: how they log in and out, what they see, and which buttons they have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from builders import ServerProcess, server_process, until
from openid_provider import openid_provider
from recorded import log

if TYPE_CHECKING:
    from conftest import OpenTab, Tab

pytestmark = pytest.mark.browser

PASSWORD = "correct horse battery"
OURS, THEIRS = "vision", "secret-project"


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two projects, each with a run that needs somebody; ada reads one of them, root administers all."""
    with server_process(tmp_path_factory.mktemp("users")) as server:
        for project in (OURS, THEIRS):
            log(server, f"run-of-{project}", 1, project, loss=2.0)
            log(server, f"run-of-{project}", 2, project, loss=math.nan)
        until(lambda: len(server.get("/alerts", state="firing")["alerts"]) == 2)
        for name, role, project in (("ada", "viewer", OURS), ("olga", "operator", OURS), ("root", "admin", None)):
            body = {"name": name, "password": PASSWORD, "roles": [{"role": role, "project": project}]}
            server.admin("POST", "/users", body)
        yield server


def log_in(tab: OpenTab, server: ServerProcess, name: str, path: str = "/", **look: Any) -> Tab:
    """By the form, in a browser of its own."""
    opened = tab(f"/login?next={path}", server=server, locale="en-US", **look)
    opened.page.get_by_label("Name").fill(name)
    opened.page.get_by_label("Password").fill(PASSWORD)
    opened.page.get_by_role("button", name="Log in", exact=True).click()
    opened.wait("() => document.querySelector('.account button')")
    return opened


def test_viewer_sees_one_project_without_buttons_operator_acts(shared_server: ServerProcess, tab: OpenTab) -> None:
    page = log_in(tab, shared_server, "ada", "/alerts")
    page.wait("() => document.querySelectorAll('.alert.card').length === 1")
    text = page.page.locator("body").inner_text()
    assert f"run-of-{OURS}" in text and THEIRS not in text
    assert page.page.locator(".alert.card .actions").count() == 0
    assert "you need the role operator" in text
    page.wait("() => document.querySelector('#count-alerts').textContent === '1'")
    page.page.goto(f"{shared_server.url}/runs")
    page.wait("() => document.querySelector('.ag-row .cell-run')")
    assert page.page.locator(".ag-row .cell-run").count() == 1
    assert THEIRS not in page.page.locator("body").inner_text()
    hidden = shared_server.get("/runs", project=THEIRS)["runs"][0]["run"]
    page.expected.append("404")
    answer = page.page.goto(f"{shared_server.url}/run/{hidden}")
    assert answer is not None and answer.status == 404
    own = shared_server.get("/runs", project=OURS)["runs"][0]["run"]
    reports = [page.page.request.get(f"{shared_server.url}/report/{one}") for one in (own, hidden)]
    assert [one.status for one in reports] == [200, 404]
    assert f"<h1>run-of-{OURS}" in reports[0].text()
    page.page.goto(f"{shared_server.url}/settings")
    page.wait("() => document.querySelector('.settings-page [role=tab]')")
    names = page.page.locator(".settings-page [role=tab]").all_inner_texts()
    assert names == ["Rules", "Prices", "Storage", "My login"]
    assert page.page.locator(".account-name").inner_text() == "ada"
    page.page.get_by_role("button", name="Log out ada").click()
    page.page.wait_for_url("**/login")
    page.page.goto(f"{shared_server.url}/settings?tab=account")
    page.wait("() => document.querySelector('.account a')?.textContent === 'Log in'")
    page = log_in(tab, shared_server, "olga", "/alerts")
    page.wait("() => document.querySelector('.alert.card')")
    page.page.get_by_role("button", name="Acknowledge").first.click()
    alerts = until(lambda: [one for one in shared_server.get("/alerts")["alerts"] if one["acknowledged"]])
    assert [(one["acknowledged_by"], one["project"]) for one in alerts] == [("olga", OURS)]


def test_an_administrator_adds_a_user_and_reads_who_did_what(shared_server: ServerProcess, tab: OpenTab) -> None:
    page = log_in(tab, shared_server, "root", "/settings?tab=users")
    page.wait("() => document.querySelector('#settings-users .plain')")
    page.page.locator("#user-name").fill("new one")
    page.page.locator("#user-password").fill(PASSWORD)
    page.page.locator("#user-project").fill(OURS)
    page.page.get_by_role("button", name="Add", exact=True).locator("visible=true").click()
    page.wait("() => document.querySelector('#settings-users .plain').textContent.includes('viewer of vision')")
    page.page.goto(f"{shared_server.url}/settings?tab=audit")
    page.wait("() => document.querySelector('#audit-entries')?.textContent.includes('user root')")
    page.page.locator("#audit-action").fill("user.add")
    page.wait("() => !document.querySelector('#audit-entries').textContent.includes('session.open')")
    assert "new one" in page.page.locator("#audit-entries").inner_text()


def test_somebody_signs_in_at_a_provider_with_a_browser(tab: OpenTab, tmp_path: Path) -> None:
    with openid_provider(ada={"preferred_username": "ada", "groups": ["team"]}) as provider:
        settings = {
            "PERFAGENT_OIDC_ISSUER": provider.issuer, "PERFAGENT_OIDC_CLIENT_ID": "perfagent",
            "PERFAGENT_OIDC_CLIENT_SECRET": "any", "PERFAGENT_OIDC_ROLES": "team=operator", "PERFAGENT_OIDC_NAME": "Example",
            "PERFAGENT_AUTH": "required",
        }  # fmt: skip
        with server_process(tmp_path, **settings) as server:
            page = tab("/runs", server=server, locale="en-US")
            page.page.get_by_role("link", name="Sign in with Example").click()
            page.page.wait_for_url(f"{provider.issuer}/**")
            page.expected.append("")  # the provider's own page is not ours to judge, nor whom it asks
            page.page.get_by_role("button", name="ada").first.click()
            page.page.wait_for_url(f"{server.url}/runs")
            page.wait("() => document.querySelector('.account-name')?.textContent === 'ada'")
            page.page.goto(f"{server.url}/settings?tab=account")
            page.wait("() => document.querySelectorAll('#settings-account tbody tr').length === 1")
            assert "change your password there" in page.page.locator("#settings-account").inner_text()
            assert page.page.locator("#settings-account input[type=password]").count() == 0
            page.hosts &= {"127.0.0.1"}


def test_axe_finds_nothing_in_the_login_and_an_admins_settings(shared_server: ServerProcess, tab: OpenTab) -> None:
    page = tab("/login", server=shared_server, width=390, height=844)
    page.page.get_by_text("Log in with a key").first.click()
    assert [f"{one['id']}: {one['help']}" for one in Axe().run(page.page).response["violations"]] == []
    page = log_in(tab, shared_server, "root", scheme="dark")
    for name in ("keys", "users", "audit", "account"):
        page.page.goto(f"{shared_server.url}/settings?tab={name}")
        page.wait(f"() => document.querySelector('#settings-{name}')")
        told = [f"{name}: {one['id']}: {one['help']}" for one in Axe().run(page.page).response["violations"]]
        assert told == []


def test_viewer_reads_what_others_wrote_and_changes_none(shared_server: ServerProcess, tab: OpenTab) -> None:
    run = shared_server.get("/runs", project=OURS)["runs"][0]["run"]
    shared_server.admin("PATCH", f"/runs/{run}", {"notes": "read this"})
    shared_server.admin("POST", f"/runs/{run}/annotations", {"step": 1, "text": "and that"})
    shared_server.admin("PUT", f"/panels/twice?project={OURS}", {"title": "Twice", "lines": ["2 * loss"]})
    page = log_in(tab, shared_server, "ada", f"/run/{run}")
    page.wait("() => document.querySelector('[data-section=own] .chart')")
    page.page.locator(".chart-notes summary").click()
    assert "read this" in page.page.locator("#run-notes").inner_text()
    assert "and that" in page.page.locator(".chart-notes").inner_text()
    assert page.page.locator(":is(#run-notes, .chart-notes) button, .panel-add").count() == 0
    page.page.get_by_label("Menu of Twice").click()
    items = page.page.locator(".chart-menu[open] [role=menuitem]").all_inner_texts()
    assert not {"Change this panel", "Delete this panel", "Annotate a step"} & set(items)
