"""The pages by keys alone, and the dialog that tells which there are."""

from __future__ import annotations

import uuid
from functools import partial
from typing import TYPE_CHECKING

import pytest
from builders import until
from recorded import record_run

if TYPE_CHECKING:
    from builders import ServerProcess
    from conftest import OpenTab

pytestmark = pytest.mark.browser


def test_rows_are_walked_opened_and_the_search_is_a_key_away(site: ServerProcess, tab: OpenTab) -> None:
    group = f"keys-{uuid.uuid4().hex[:6]}"
    for place in range(3):
        record_run(site, f"{group}-{place}", steps=3)
    page = tab(f"/runs?q={group}&sort=name&order=asc")
    page.live()
    page.wait("() => document.querySelectorAll('.ag-row a.name').length === 3")
    keys = page.page.keyboard
    focused = "document.activeElement.textContent"
    for key, row in (("j", 0), ("j", 1), ("j", 2), ("j", 2), ("k", 1)):
        keys.press(key)
        assert page.page.evaluate(focused) == f"{group}-{row}"
    keys.press("/")
    assert page.page.evaluate("document.activeElement.tagName") == "INPUT"
    keys.type("j/")
    assert page.page.evaluate("document.activeElement.value").endswith("j/"), "who types is left alone"
    page.page.goto(f"{site.url}/runs?q={group}&sort=name&order=asc")
    page.wait("() => document.querySelectorAll('.ag-row a.name').length === 3")
    keys.press("j")
    keys.press("Enter")
    page.wait(f"() => location.pathname === '/run/{group}-0'")


def test_g_and_a_letter_lead_to_a_page(tab: OpenTab) -> None:
    page = tab("/")
    page.live()

    def leads_to(letter: str, path: str) -> bool:
        """A page that stalls between the two keys forgets the first one."""
        page.page.keyboard.press("g")
        page.page.keyboard.press(letter)
        return bool(page.page.evaluate("location.pathname") == path)

    for letter, path in (("r", "/runs"), ("a", "/alerts"), ("c", "/compare"), ("s", "/settings"), ("o", "/")):
        until(partial(leads_to, letter, path), every_s=1.0)
        if path == "/runs":  # it fetches the script of its table, which must not arrive on another page
            page.wait("() => document.querySelector('.runs-page')")


def test_a_question_mark_tells_the_keys_and_escape_closes_them(tab: OpenTab) -> None:
    page = tab("/alerts")
    page.live()
    page.page.keyboard.press("?")
    dialog = page.page.get_by_role("dialog", name="Keys")
    assert "acknowledge its alert" in dialog.inner_text()
    page.page.keyboard.press("Escape")
    page.wait("() => !document.querySelector('dialog[open]')")
    page.page.locator("#keys").click()
    page.wait("() => document.querySelector('dialog[open]')")


def test_theme_is_light_dark_or_the_systems_and_remembered(tab: OpenTab) -> None:
    page = tab("/alerts", scheme="dark")
    page.wait("() => document.querySelector('#theme')?.dataset.ready")
    seen = "[document.documentElement.dataset.theme, document.documentElement.dataset.mantineColorScheme]"
    for choice, theme in (("as the system", "dark"), ("light", "light"), ("dark", "dark"), ("as the system", "dark")):
        page.wait(f"() => document.querySelector('#theme').title.includes('{choice}')")
        page.wait(f'() => JSON.stringify({seen}) === \'["{theme}","{theme}"]\'')
        page.page.locator("#theme").click()
    page.page.reload()
    page.wait("() => document.documentElement.dataset.theme === 'light'")
    assert page.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(245, 247, 249)"
    for _ in range(2):  # past dark, to the system's again
        page.page.locator("#theme").click()
    page.wait("() => document.querySelector('#theme').title.includes('as the system')")
    page.page.emulate_media(color_scheme="light")
    page.wait("() => document.documentElement.dataset.theme === 'light'")
