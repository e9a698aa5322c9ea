"""Settings in the page: channels with their test, keys, rules and prices, for who may; a sentence for who may not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from builders import Receiver, ServerProcess, server_process, until

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


def as_admin(tab: OpenTab, server: ServerProcess, path: str, locale: str = "en-US") -> Tab:
    link = server.admin("POST", "/session/links")["url"].removeprefix(server.url)
    page = tab(link, server=server, locale=locale)
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
    page.wait("() => document.body.textContent.includes('nobody is notified of an alert')")
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


def test_an_alert_is_tried_on_a_run_and_made_in_chinese(fresh: ServerProcess, tab: OpenTab) -> None:
    rows = [{"project": "p", "run": "r", "step": at, "metrics": {"val/acc": float(at < 5)}} for at in range(10)]
    fresh.admin("POST", "/log", rows)
    page = as_admin(tab, fresh, "/settings?tab=rules", locale="zh-CN")
    for field, value in {"metric": "val/acc", "threshold": "0.5", "duration": "3", "name": "low"}.items():
        page.page.locator(f"#own-{field}").fill(value)
    page.page.locator("#own-comparison").click()
    page.page.get_by_role("option", name="<", exact=True).click()
    page.page.get_by_role("button", name="在任务上试算").click()
    page.wait("() => document.querySelector('#own-tried td')?.parentElement.textContent.includes('自第 5 步起 < 0.5')")
    assert "会触发 1 次" in page.page.locator("#own-tried").inner_text()
    page.page.get_by_role("button", name="添加告警").click()
    page.wait("() => document.querySelector('#own-alerts')?.textContent.includes('val/acc < 0.5，持续 3 步')")
    fresh.admin("POST", "/log", [{**rows[-1], "step": at} for at in range(10, 15)])
    until(lambda: [one["rule"] for one in fresh.get("/alerts")["alerts"]] == ["own:low"])


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
    limits_in_words = ("Requests a second: 50", "Samples a second: no limit", "Bytes a second: 2 MiB")
    for part in (*limits_in_words, "All projects", "never"):
        assert part in shown
    limits = {one["name"]: one["limits"] for one in fresh.admin("GET", "/keys")["keys"]}["cluster"]
    assert limits == {"requests_per_s": 50, "samples_per_s": "Infinity", "bytes_per_s": 2097152}


def test_a_price_is_set_and_in_the_log_and_storage_has_its_sizes(fresh: ServerProcess, tab: OpenTab) -> None:
    page = as_admin(tab, fresh, "/settings?tab=prices")
    page.page.get_by_label("GPU hour").fill("2.5")
    page.page.get_by_role("button", name="Set").click()
    page.wait("() => document.querySelector('#settings-prices .plain')?.textContent.includes('2.5 EUR')")
    assert fresh.get("/prices")["prices"][0]["gpu_hour"] == 2.5
    page.page.goto(f"{fresh.url}/settings?tab=audit")
    page.wait("() => document.querySelector('#audit-entries td')")
    logged = page.page.locator("#audit-entries tr", has_text="price.change").first.inner_text()
    assert "gpu_hour 2.5, currency EUR" in logged
    page.page.goto(f"{fresh.url}/settings?tab=storage")
    page.wait("() => document.querySelector('#settings-storage dl')")
    shown = page.page.locator("#settings-storage").inner_text()
    assert " KiB" in shown or " MiB" in shown
    assert "`" not in shown
    assert page.page.locator("#settings-storage code").count() == 2


def test_who_may_not_sees_no_channel_and_no_key(fresh: ServerProcess, tab: OpenTab) -> None:
    page = tab("/settings", server=fresh)
    page.wait("() => document.body.textContent.includes('Only an administrator sees this')")
    assert page.page.locator("#channel-url").count() == 0
