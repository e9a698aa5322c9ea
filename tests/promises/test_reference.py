"""What we promise about the reference: every public name, argument, route and page stands where a reader finds it."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from authorization_table import TABLE
from documents import ROOT, Document, documents
from word_count import BUDGET, words_by_page

import perfagent
import perfagent.integrations
import perfagent_client

griffe = pytest.importorskip("griffe", reason="scripts/install --light leaves the site out")
pytestmark = pytest.mark.real  # some ask git for its files

DOCS = ROOT / "docs"
PYTHON = " ".join(
    (DOCS / "reference" / f"{name}.md").read_text("utf-8") for name in ("python", "python-loop", "python-client")
)
SHOWN = re.findall(r"^::: (\S+)", PYTHON, re.MULTILINE)
"""Python names whose docstrings the site shows."""


def test_public_python_names_are_on_a_page() -> None:
    public = {f"{module.__name__}.{name}" for module in (perfagent, perfagent_client) for name in module.__all__}
    assert public - {*SHOWN, *re.findall(r"`(perfagent\.\w+)`", PYTHON)} == set()
    assert {*perfagent.integrations.__all__} - {name.rpartition(".")[2] for name in SHOWN} == set()


@functools.cache
def sources() -> griffe.ModulesCollection:
    loader = griffe.GriffeLoader(search_paths=[ROOT / "agent", ROOT / "client"])
    for package in ("perfagent", "perfagent_loop", "perfagent_client"):
        loader.load(package)
    loader.resolve_aliases()
    return loader.modules_collection


def described(name: str) -> set[str]:
    """Names in the sections of a docstring that list arguments or attributes."""
    found = sources()[name]
    sections = found.docstring.parse("google") if found.docstring else []
    listed = {griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes}
    return {item.name.lstrip("*") for section in sections if section.kind in listed for item in section.value}


@pytest.mark.parametrize("name", SHOWN)
def test_every_argument_of_a_public_name_is_described(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "griffe"):
        known = described(name)
    assert caplog.messages == []  # such as an argument that does not exist
    found = sources()[name]
    assert found.docstring, "what is it?"
    if found.is_function or "__init__" in found.members or "dataclass" in found.labels:
        arguments = {argument.name for argument in found.parameters} - {"self"}
        assert {one for one in arguments if not one.startswith("_")} - known <= EXPLAINED_BY_ITS_CLASS.get(name, set())


EXPLAINED_BY_ITS_CLASS = {
    "perfagent.CheckpointError": {"message"},
    "perfagent.Stopped": {"message"},
    "perfagent.StepResult": {"found_inf"},
}
"""Arguments of what scripts do not make themselves."""


def test_every_route_is_on_a_page() -> None:
    page = "".join((DOCS / "reference" / name).read_text("utf-8") for name in ("http.md", "authorization.md"))
    assert [f"{method} {path}" for method, path in TABLE if f"`{method} {path}`" not in page] == []


def in_navigation(part: object) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    else:
        for below in part.values() if isinstance(part, dict) else part:  # type: ignore[attr-defined]
            yield from in_navigation(below)


def pages() -> set[str]:
    return {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


def test_every_page_is_in_the_navigation_once() -> None:
    settings = yaml.load((ROOT / "website" / "mkdocs.yml").read_text("utf-8"), _AnyTag)
    named = [*in_navigation(settings["nav"])]
    assert sorted(named) == sorted({*named})
    assert {page for page in pages() if not page.startswith("zh/")} - {*named} == set()


class _AnyTag(yaml.SafeLoader):
    """Reads a value with a tag of mkdocs or Python as nothing."""


_AnyTag.add_multi_constructor("", lambda _loader, _tag, _node: None)


def test_links_lead_from_the_readme_to_every_page() -> None:
    known = {document.path: document for document in documents()}
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        path = waiting.pop()
        if path not in reached and path in known:
            reached.add(path)
            waiting += linked(known[path])
    assert {page for page in pages() if DOCS / page not in reached} == set()


def linked(page: Document) -> list[Path]:
    targets = (target.partition("#")[0] for target, _line in page.links())
    return [(page.path.parent / target).resolve() for target in targets if target and "://" not in target]


def test_people_wrote_no_more_words_than_the_budget() -> None:
    counts = words_by_page()
    assert counts["docs/reference/glossary.md"] > 100
    assert "docs/reference/metrics.md" not in counts  # the code says all of it
    assert sum(counts.values()) <= BUDGET, "scripts/words counts them by page: shorten one"
