"""Every text is used, exists in both languages and has the same placeholders; a page in Chinese shows no English sentence of
ours."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fluent.syntax import FluentParser
from fluent.syntax.ast import Junk, Message
from recorded import record_run

import perfagent_dashboard
from perfagent.wire import CATALOGUE, OUTCOMES
from perfagent_dashboard.components.prose import prose
from perfagent_dashboard.figures.charts import CHARTS
from perfagent_dashboard.words import LANGUAGES, keys, say, sentence, templates, title_of

if TYPE_CHECKING:
    from builders import ServerProcess
    from conftest import OpenTab
    from syrupy.assertion import SnapshotAssertion

WORDS = Path(perfagent_dashboard.__file__).with_name("words")
LEFT = """words => {
  const known = new Set(words), found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); ) {
    if (known.has(node.textContent.trim()) && node.parentElement.checkVisibility()) found.push(node.textContent);
  }
  for (const name of ["title", "aria-label", "placeholder"]) {
    const said = [...document.querySelectorAll(`[${name}]`)].map((node) => node.getAttribute(name));
    found.push(...said.filter((text) => known.has(text)));
  }
  return found;
}"""


def test_a_verdict_has_one_word_on_the_pages_and_on_the_wire() -> None:
    assert [say(f"severity_{one}") for one in OUTCOMES] == [*OUTCOMES]


def messages(language: str) -> dict[str, str]:
    """What stands in a language's file, by key. What Fluent cannot read is an error."""
    source = (WORDS / f"{LANGUAGES[language]}.ftl").read_text("utf-8")
    body = FluentParser().parse(source).body
    assert [entry.content for entry in body if isinstance(entry, Junk)] == []
    found = [entry for entry in body if isinstance(entry, Message)]
    assert [key for key, times in Counter(entry.id.name for entry in found).items() if times > 1] == []
    return {entry.id.name: source[entry.span.start : entry.span.end] for entry in found if entry.span}


def figures(message: str) -> set[str]:
    """Those that are shown: one that only chooses a plural may be missing where there is none."""
    return set(re.findall(r"\{ \$(\w+) \}", message))


def test_both_languages_say_the_same_things_with_the_same_values() -> None:
    english, chinese = messages("en"), messages("zh")
    assert chinese.keys() == english.keys()
    assert [key for key in english if figures(english[key]) != figures(chinese[key])] == []
    repeated = {key for text in (*english.values(), *chinese.values()) for key in re.findall(r"\{ (\w+) \}", text)}
    assert repeated <= english.keys()


def test_one_is_no_plural() -> None:
    assert say("delete_sure", count=1) == "Delete 1 run with all its samples? This cannot be undone."
    assert say("delete_sure", count=2) == "Delete 2 runs with all their samples? This cannot be undone."
    assert say("equal_settings", count=1001) == "1,001 other entries are equal."
    assert say("group_told", count=2, runs=1) == "2 alerts in 1 run"


def test_expected_gain_is_an_upper_limit_in_both_languages(words: SnapshotAssertion) -> None:
    assert [sentence(language, "gain", gain="95") for language in LANGUAGES] == words


def test_the_scripts_get_the_sentences_that_they_name() -> None:
    told = templates("en", """say("ranks", { count }), words.undo, say(`act_${act}`, {}), say('alike')""")
    assert told["ranks"] == ["{count} rank", "{count} ranks"]
    assert (told["undo"], told["act_ack"]) == ("Undo", "Acknowledge")
    assert not {"bulk_ack", "delete_sure", "alike_runs"} & told.keys()
    assert templates("zh", '"ranks"') == {"ranks": "{count} 个 rank"}


def test_every_sentence_is_said_somewhere() -> None:
    folder = Path(perfagent_dashboard.__file__).parent
    files = [file for file in folder.rglob("*") if file.suffix in (".py", ".js") and file.parent.name != "words"]
    source = "\n".join(file.read_text("utf-8") for file in files)
    named = {*re.findall(r"""["']([\w-]+)["']""", source), *re.findall(r"\bwords\.(\w+)", source)}
    begins = {
        *re.findall(r"""f["'](\w+_)\{""", source),
        *re.findall(r"`(\w+_)\$\{", source),
        *re.findall(r"""["'](\w+_)["'] \+""", source),
    }
    ends = set(re.findall(r"""\}(_\w+)["']""", source))
    silent = [
        key for key in keys("en")
        if key not in named and not any(map(key.startswith, begins)) and not any(map(key.endswith, ends))
    ]  # fmt: skip
    assert silent == []


@pytest.mark.browser
def test_the_browsers_language_is_taken_until_somebody_chooses(site: ServerProcess, tab: OpenTab) -> None:
    page = tab("/alerts", locale="zh-CN")
    page.wait("() => document.querySelector('h1')?.textContent === '告警'")
    assert page.page.evaluate("document.documentElement.lang") == "zh"
    page.page.locator("#language").click()
    page.wait("() => document.querySelector('h1')?.textContent === 'Alerts'")
    page.page.goto(f"{site.url}/settings")
    page.wait("() => document.querySelector('h1')?.textContent === 'Settings'")


@pytest.mark.browser
@pytest.mark.parametrize(
    "path",
    [
        "/run/{run}",
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in ("/", "/runs", "/run/{run}?tab=config", "/compare?runs={run},{run}:1-20", "/alerts", "/settings")
        ),
    ],
)
def test_a_page_in_chinese_has_no_english_sentence_of_ours(
    site: ServerProcess, tab: OpenTab, run: str, path: str
) -> None:
    record_run(site, run, steps=40)
    page = tab(path.format(run=run), locale="zh-CN")
    page.wait("() => document.querySelector('[data-page] h1, h1')")
    page.page.wait_for_timeout(800)
    metrics = {row.title for row in CATALOGUE.values()}  # stay English
    plain = [key for key, text in messages("en").items() if "$" not in text]
    ours, chinese = ({sentence(language, key) for key in plain} for language in LANGUAGES)
    assert page.page.evaluate(LEFT, sorted(one for one in ours - chinese - metrics if len(one) > 2)) == []


def test_titles_of_metrics_are_those_of_the_catalogue() -> None:
    titles = tomllib.loads((WORDS / "chinese_metrics.toml").read_text("utf-8"))
    assert titles.keys() <= CATALOGUE.keys(), "a metric that there is not"
    shown = {chart.name for chart in CHARTS[:30]} - {"mfu"}  # said so in Chinese, too
    assert shown <= titles.keys(), "what every run shows has a Chinese title"
    assert [title_of("phase/data_s", language) for language in ("en", "zh")] == ["Data wait", "等待数据"]


def test_setting_in_a_chinese_sentence_is_code_alone() -> None:
    text = "设置 num_workers=1（现在为 0）、persistent_workers=True 和 pin_memory=True。调用 clip_grad_norm_()。"
    code = [part.children for part in prose(text) if not isinstance(part, str)]
    assert code == ["num_workers=1", "persistent_workers=True", "pin_memory=True", "clip_grad_norm_()"]
