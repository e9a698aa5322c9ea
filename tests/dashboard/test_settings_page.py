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


def test_a_key_has_limits_of_its_own(fresh: ServerProcess, tab: OpenTab) -> None:
    page = as_admin(tab, fresh, "/settings?tab=keys")
    page.page.locator("#key-name").fill("cluster")
    page.page.get_by_label("Requests a second").fill("fast")
    page.page.get_by_role("button", name="Create").click()
    page.wait("() => document.body.textContent.includes('requests_per_s')")
    page.page.get_by_label("Requests a second").fill("50")
    page.page.get_by_label("Samples a second").fill("inf")
    page.page.get_by_label("Bytes a second").fill("2097152")
    page.page.get_by_role("button", name="Create").click()
    page.wait("() => document.querySelector('.secret code')")
    shown = page.page.locator("#settings-keys tr", has_text="cluster").inner_text()
    for part in (
        "Requests a second: 50",
        "Samples a second: no limit",
        "Bytes a second: 2 MiB",
        "All projects",
        "never",
    ):
        assert part in shown
    limits = {one["name"]: one["limits"] for one in fresh.admin("GET", "/keys")["keys"]}["cluster"]
    assert limits == {"requests_per_s": 50, "samples_per_s": "Infinity", "bytes_per_s": 2097152}


def test_storage_tells_sizes_in_the_unit_that_fits_and_commands_as_code(fresh: ServerProcess, tab: OpenTab) -> None:
    page = as_admin(tab, fresh, "/settings?tab=storage")
    page.wait("() => document.querySelector('#settings-storage dl')")
    shown = page.page.locator("#settings-storage").inner_text()
    assert " KiB" in shown or " MiB" in shown
    assert "`" not in shown
    assert page.page.locator("#settings-storage code").count() == 2


def test_the_audit_log_tells_a_price_in_words(fresh: ServerProcess, tab: OpenTab) -> None:
    fresh.admin("PUT", "/prices?project=vision", {"gpu_hour": 2.5, "currency": "EUR"})
    page = as_admin(tab, fresh, "/settings?tab=audit")
    page.wait("() => document.querySelector('#audit-entries td')")
    shown = page.page.locator("#audit-entries tr", has_text="price.change").first.inner_text()
    assert "gpu_hour 2.5, currency EUR" in shown and shown.count("vision") == 1


def test_on_a_phone_every_button_of_settings_is_in_sight(fresh: ServerProcess, tab: OpenTab) -> None:
    address = "https://hooks.example.com/a/rather/long/path/of/a/receiver/0123456789abcdef"
    made = fresh.admin("POST", "/channels", {"kind": "webhook", "url": address, "name": "a receiver of alerts"})
    page = as_admin(tab, fresh, "/settings")
    page.page.set_viewport_size({"width": 390, "height": 844})
    page.wait("() => document.querySelector('#settings-channels .plain .actions')")
    for button in page.page.locator("#settings-channels .plain button").all():
        box = button.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390
    assert page.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    fresh.admin("DELETE", f"/channels/{made['id']}")


def test_who_may_not_sees_no_channel_and_no_key(fresh: ServerProcess, tab: OpenTab) -> None:
    page = tab("/settings", server=fresh)
    page.wait("() => document.body.textContent.includes('Only an administrator sees this')")
    assert page.page.locator("#channel-url").count() == 0
