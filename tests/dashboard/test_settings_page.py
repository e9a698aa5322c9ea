"""Settings in the page: channels with their test, keys, rules and prices, for who may; a sentence for who may not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from builders import Receiver, ServerProcess, server_process

if TYPE_CHECKING:
    from conftest import OpenTab, Tab

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def receiver_of_tests() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory, receiver_of_tests: Receiver) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("fresh"), PERFAGENT_WEBHOOK_ALLOW=receiver_of_tests.address) as server:
        yield server


def as_admin(tab: OpenTab, server: ServerProcess, path: str) -> Tab:
    link = server.admin("POST", "/session/links")["url"].removeprefix(server.url)
    page = tab(link, server=server, locale="en-US")
    page.page.goto(server.url + path)
    return page


def test_a_channel_is_added_tested_and_removed(fresh: ServerProcess, receiver_of_tests: Receiver, tab: OpenTab) -> None:
    page = as_admin(tab, fresh, "/settings")
    page.page.locator("#channel-url").fill(receiver_of_tests.url)
    page.page.get_by_role("button", name="Add").click()
    page.wait("() => document.querySelector('.secret code')?.textContent.startsWith('whsec_')")
    page.page.get_by_role("button", name="Test").click()
    page.wait("() => document.body.textContent.includes('The test arrived.')")
    assert receiver_of_tests.of_type("channel.test")
    page.page.get_by_role("button", name="Remove").click()
    page.wait("() => document.body.textContent.includes('nobody is told of an alert')")
    assert fresh.admin("GET", "/channels")["channels"] == []


def test_a_rule_has_other_thresholds_and_is_as_usual_again(fresh: ServerProcess, tab: OpenTab) -> None:
    page = as_admin(tab, fresh, "/settings?tab=rules")
    page.page.get_by_role("button", name="Loss is NaN or infinite").click()
    field = page.page.get_by_label("excused steps").first
    field.fill("7")
    page.page.get_by_role("button", name="Save").locator("visible=true").click()
    page.wait("() => document.body.textContent.includes('Saved. It counts')")

    def excused() -> float:
        rules = fresh.get("/rules")["rules"]
        return float(next(one for one in rules if one["rule"] == "nonfinite_loss")["thresholds"]["excused_steps"])

    assert excused() == 7
    page.page.get_by_role("button", name="As usual").locator("visible=true").click()
    page.wait("() => document.body.textContent.includes('The rule is as usual again')")
    assert excused() == 2


@pytest.mark.long
def test_a_key_is_made_and_a_price_is_set(fresh: ServerProcess, tab: OpenTab) -> None:
    page = as_admin(tab, fresh, "/settings?tab=keys")
    page.page.locator("#key-name").fill("on call")
    page.page.get_by_role("button", name="Create").click()
    page.wait("() => document.querySelector('.secret code')")
    assert [one["name"] for one in fresh.admin("GET", "/keys")["keys"]] == ["on call"]
    page.page.get_by_role("tab", name="Prices").click()
    page.page.get_by_label("GPU hour").fill("2.5")
    page.page.get_by_role("button", name="Set").click()
    page.wait("() => document.querySelector('#settings-prices .plain')?.textContent.includes('2.5 EUR')")
    assert fresh.get("/prices")["prices"][0]["gpu_hour"] == 2.5


def test_who_may_not_sees_no_channel_and_no_key(fresh: ServerProcess, tab: OpenTab) -> None:
    page = tab("/settings", server=fresh)
    page.wait("() => document.body.textContent.includes('Only an administrator sees this')")
    assert page.page.locator("#channel-url").count() == 0
