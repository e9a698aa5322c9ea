"""What the rules say, by language."""

from __future__ import annotations

import re
import string
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perfagent.wire import Finding
from perfagent_server.rules import texts
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.causes import cause_words
from perfagent_server.rules.texts import (
    LANGUAGES,
    Language,
    MissingFigureError,
    Text,
    grammar_of,
    said,
    said_in,
    text_of,
)
from perfagent_server.rules.texts.filling import OPTIONAL
from perfagent_server.rules.texts.spoken import spoken
from perfagent_server.verdict.healthy import Healthy

SENTENCES = ("title", "message", "cost", "remedy")


def templates(text: Text) -> Iterator[tuple[tuple[str, str], str]]:
    for cause in ("", *text.causes):
        for what in SENTENCES:
            yield (cause, what), text.of(what, cause)


def figures(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template.replace("[[", "").replace("]]", "")) if name}


def test_rules_fire_on_the_same_thresholds_in_all_languages() -> None:
    for rule in all_rules():
        for language in LANGUAGES:
            text = rule.text(language)
            assert text.name and text.symptom and text.meaning and text.remedy
            assert text.fires.format(**rule.thresholds())
            assert figures(text.fires) == figures(rule.text().fires), rule.id


def test_sentences_have_the_same_figures_in_all_languages() -> None:
    for rule in all_rules():
        english, chinese = rule.text(), rule.text("zh")
        assert english.causes.keys() == chinese.causes.keys()
        for (which, one), (_, other) in zip(templates(english), templates(chinese), strict=True):
            assert figures(one) == figures(other), (rule.id, which)
            assert len(OPTIONAL.findall(one)) == len(OPTIONAL.findall(other)), (rule.id, which)
        assert english.words.keys() == chinese.words.keys()
        for figure, words in english.words.items():
            others = chinese.words[figure]
            assert {key: figures(word) for key, word in words.items()} == {
                key: figures(word) for key, word in others.items()
            }


def test_words_name_the_same_values_in_all_languages() -> None:
    tables = [(rule.id, *(rule.text(language).words for language in LANGUAGES)) for rule in all_rules()]
    tables.append(("grammar", *(grammar_of(language).words for language in LANGUAGES)))
    for whose, one, other in tables:
        assert {name: words.keys() for name, words in one.items()} == {
            name: words.keys() for name, words in other.items()
        }, whose


def test_what_agents_find_has_the_same_figures_in_all_languages() -> None:
    files = [Path(texts.__file__).with_name(f"{name}.toml") for name in LANGUAGES.values()]
    english, chinese = (flat(tomllib.loads(file.read_text("utf-8"))["found"]) for file in files)
    assert english.keys() == chinese.keys()
    for name, one in english.items():
        assert figures(one) == figures(chinese[name]), name


def flat(table: dict[str, Any]) -> dict[str, str]:
    """The sentences of a table and of the tables in it, by their names."""
    found: dict[str, str] = {}
    for name, value in table.items():
        found |= (
            {f"{name}.{inner}": text for inner, text in flat(value).items()}
            if isinstance(value, dict)
            else {name: value}
        )
    return found


TEXT = Text(
    name="n", meaning="m", fires="f", remedy="Set it to {wanted} [[(now {now}) ]]in {{config}}.",
    title="{wait_s:span} of {share:.0f} %", message="{steps:some step}[[ on {ranks:ranks}]] in {role:word}.",
    causes={
        "full": {"message": "{size:size} full on {ranks:ranks}."},
        "hang": {"message": "{ranks:Ranks}: {wait_s:span}. {places:said 2}."},
        "once": {"message": "{places:said}."},
        "diverged": {"message": "{series:Loss} is {loss:number} in {layer:short}[[ and {others:list 2}]]: {series:loss}."},
        "in parts": {"message": "[[{wait_s:span}. ]][[{now}.]]"},
        "phase": {"message": "{role:word}, {phase:word}, {own:word}"},
    },
    words={
        "role": {"work": "the working directory"},
        "places": {"waits": "{ranks:ranks} waits at {at}", "reads": "{ranks:ranks} at {at}[[ ({size:size})]]"},
    },
)  # fmt: skip
WAITS, READS = {"kind": "waits", "ranks": [2], "at": "a[[0]]"}, {"kind": "reads", "ranks": [0], "at": "{b}"}
FIGURES = {"wanted": 4, "wait_s": 0.05, "share": 31.2, "steps": 1, "role": "work"}


@pytest.mark.parametrize(
    ("cause", "more", "message", "fix"),
    [
        ("", {}, "1 step in the working directory.", "Set it to 4 in {config}."),
        ("", {"now": 2, "ranks": []}, "1 step in the working directory.", "Set it to 4 (now 2) in {config}."),
        ("", {"ranks": [3], "world_size": 8}, "1 step on rank 3 in the working directory.", "Set it to 4 in {config}."),
        ("full", {"ranks": [0, 1], "world_size": 2, "size": 2**30}, "1 GiB full on all 2 ranks.", "Set it to 4 in {config}."),
        ("full", {"ranks": [0, 1], "world_size": 9, "size": 1}, "1 B full on 2 of 9 ranks (0, 1).", "Set it to 4 in {config}."),
        ("hang", {"ranks": [0], "world_size": 1, "places": [WAITS, READS]}, "Rank 0: 50 ms. rank 2 waits at a[[0]]; rank 0 at "
         "{b}.", "Set it to 4 in {config}."),
        ("hang", {"ranks": [0, 1], "places": 3 * [READS | {"size": 2}]}, "All 2 ranks: 50 ms. rank 0 at {b} (2 B); rank 0 at {b} "
         "(2 B); and 1 more.", "Set it to 4 in {config}."),
        ("diverged", {"series": "loss", "loss": 12345.6, "layer": "a", "others": {"b": 1.0, "c": 2.0, "d": 3.0}}, "The loss is "
         "12,346 in a and b, c and more: the loss.", "Set it to 4 in {config}."),
        ("diverged", {"series": "vae/loss", "loss": "NaN", "layer": "block." * 9 + "fc"}, "vae/loss is NaN in "
         "...lock.block.block.block.block.block.fc: vae/loss.", "Set it to 4 in {config}."),
        ("once", {"places": WAITS}, "rank 2 waits at a[[0]].", "Set it to 4 in {config}."),
        ("full", {"ranks": [0, 4, 5, 6], "world_size": 9, "size": 1}, "1 B full on 4 of 9 ranks (0, 4-6).",
         "Set it to 4 in {config}."),
        ("in parts", {}, "50 ms.", "Set it to 4 in {config}."),
        ("phase", {"phase": "data", "own": "plots"}, "the working directory, waiting for data, plots",
         "Set it to 4 in {config}."),
    ],
)  # fmt: skip
def test_sentence_is_filled_with_what_is_known(cause: str, more: dict[str, object], message: str, fix: str) -> None:
    words = said(TEXT, cause, FIGURES | more)
    assert (words.title, words.message, words.cost, words.fix) == ("50 ms of 31 %", message, "", fix)


@pytest.mark.parametrize(
    ("wait_s", "language", "span"),
    [(40, "en", "40 s"), (205, "en", "3.4 min"), (4e5, "en", "5 days"), (4e5, "zh", "5 天")],
)
def test_long_title_is_cut_and_a_long_span_is_in_its_language(wait_s: float, language: Language, span: str) -> None:
    words = said(TEXT, "", FIGURES | {"wait_s": wait_s, "share": 1e90}, language)
    assert words.title.startswith(f"{span} of ")
    assert (words.title[-3:], len(words.title)) == ("...", 90)


def test_stored_figures_of_another_kind_say_nothing() -> None:
    figures = {"step": 30, "series": "loss", "value": "NaN"}
    assert said_in("nonfinite_loss", "", figures, "en") == said_in(
        "nonfinite_loss", "", figures | {"last_finite": None}, "en"
    )
    for odd in ({"step": "thirty"}, {"step": None}, {"last_finite": [1]}, {"ranks": 3}):
        assert said_in("nonfinite_loss", "", figures | odd, "en") is None


def test_sentence_without_its_figure_is_refused() -> None:
    with pytest.raises(MissingFigureError, match="size"):
        said(TEXT, "full", FIGURES | {"ranks": [0]})


def test_a_list_of_remedies_has_no_figures() -> None:
    assert TEXT.remedies == {"": "Set it to … in {config}."}


def test_a_language_that_nobody_knows_is_english() -> None:
    found = Finding(rule="nonfinite_loss", severity="critical", message="", evidence={"value": "NaN", "step": 7})
    assert spoken(found, "Inf") == spoken(found, "en")  # type: ignore[arg-type]
    assert text_of("nonfinite_loss", "Inf") == text_of("nonfinite_loss")  # type: ignore[arg-type]


def test_chinese_sentences_stand_together_without_a_space() -> None:
    english = said_in("nonfinite_loss", "", {"step": 30, "series": "loss", "value": "NaN"}, "en")
    assert english is not None
    cause = {"cause": "batch", "rank": 0, "step": 30, "batch_step": 30, "batch_tensor": "x"}
    known = cause_words(cause)
    assert known is not None
    found = Finding(
        rule="nonfinite_loss", severity="critical", message=f"{english.message} {known.message} 任务在第 40 步之后完成。",
        evidence={"step": 30, "series": "loss", "value": "NaN", "causes": [{**cause, "message": known.message}]},
    )  # fmt: skip
    healthy = Healthy(language="zh", opening="nothing_holds_back", facts=["第 9 步"], remarks=["每步用时减少。"])
    for message in (spoken(found, "zh").message, healthy.message):
        assert message.count("。") >= 2 and "。 " not in message


def test_chinese_has_one_term_for_one_thing() -> None:
    """That of the pages: a run is 任务, an alert is 告警, the verdict is 诊断."""
    others = re.compile("本次运行|整个运行|停止运行|警报|解除|结论|批次|死亡|失去联系|(?<!激活)(?<!梯度)检查点")
    text = (Path(texts.__file__).with_name("chinese.toml")).read_text("utf-8").replace("\\\n", "")
    assert others.findall(text) == []
