"""Writes results for CI systems: SARIF 2.1.0 (https://docs.oasis-open.org/sarif/sarif/v2.1.0/) with all that GitHub's code
scanning requires (https://docs.github.com/en/code-security/reference/code-scanning/sarif-files/sarif-support), and JUnit XML."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from perfagent import __version__
from perfagent_server.rules.texts import text_of

__all__ = ["SARIF_LEVELS", "Failure", "Result", "TestCase", "junit", "sarif"]

SARIF_LEVELS = {"info": "note", "warning": "warning", "critical": "error"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_FIRST_LINE = {"startLine": 1, "startColumn": 1, "endLine": 1, "endColumn": 1}
"""A finding is one of a whole run; code scanning shows no result without a line."""
_NO_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Result:
    """level: one of SARIF_LEVELS' values. place: the file or folder, else the name of the run. run: its name, where a file may
    hold several."""

    rule: str
    level: str
    message: str
    place: str
    run: str = ""
    properties: Mapping[str, Any] = field(default_factory=dict)


def sarif(tool: str, results: Sequence[Result], own_rules: Mapping[str, str] | None = None) -> str:
    """own_rules: a sentence on each rule of the tool that is none of the server's."""
    rules = sorted({one.rule for one in results})
    driver = {"name": tool, "version": __version__, "rules": [_rule(rule, own_rules or {}) for rule in rules]}
    runs = [{"tool": {"driver": driver}, "results": [_result(one, rules.index(one.rule)) for one in results]}]
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": runs}, indent=1)


def _rule(rule: str, own_rules: Mapping[str, str]) -> dict[str, Any]:
    try:
        text = text_of(rule)
        name, meaning, remedy = text.name, text.meaning, text.remedies[""]
    except KeyError:  # what a script, or an agent of another version, said itself
        name = meaning = remedy = own_rules.get(rule, rule)
    texts = {"shortDescription": name, "fullDescription": meaning, "help": remedy}
    return {"id": rule, "name": name, **{key: {"text": text} for key, text in texts.items()}}


def _result(one: Result, rule_index: int) -> dict[str, Any]:
    uri = _uri(one.place)
    # The upload action would take the file's first lines for it, which are others in each training.
    identity = hashlib.sha256("\0".join((one.rule, uri, one.run)).encode(errors="replace")).hexdigest()
    place = {"artifactLocation": {"uri": uri}, "region": _FIRST_LINE}
    return {
        "ruleId": one.rule,
        "ruleIndex": rule_index,
        "level": one.level,
        "message": {"text": one.message or one.rule},
        "locations": [{"physicalLocation": place}],
        "partialFingerprints": {"primaryLocationLineHash": identity[:16]},
        "properties": dict(one.properties),
    }


def _uri(path: str) -> str:
    """Relative to the root of the repository, or else to the working directory, where it lies below it."""
    file = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would leave the repository through a link
    root = next((one for one in file.parents if (one / ".git").exists()), Path.cwd())
    return quote(file.relative_to(root).as_posix(), errors="replace") if file.is_relative_to(root) else file.as_uri()


@dataclass(frozen=True, slots=True)
class Failure:
    message: str
    type: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class TestCase:
    """A test passes without a failure. skipped: why it has no result."""

    name: str
    class_name: str
    failures: Sequence[Failure] = ()
    skipped: str = ""


def junit(name: str, cases: Sequence[TestCase]) -> str:
    """name: of the test suite."""
    counts = {"tests": len(cases), "failures": sum(bool(one.failures) for one in cases)}
    counts |= {"skipped": sum(bool(one.skipped) for one in cases), "errors": 0}
    suite = ElementTree.Element("testsuite", {"name": name, **{what: str(count) for what, count in counts.items()}})
    for one in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=_xml(one.class_name), name=_xml(one.name))
        for failure in one.failures:
            about = {"message": _xml(failure.message)} | ({"type": failure.type} if failure.type else {})
            ElementTree.SubElement(case, "failure", about).text = _xml(failure.text)
        if one.skipped:
            ElementTree.SubElement(case, "skipped", message=_xml(one.skipped))
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    """Without the characters that XML 1.0 forbids."""
    return _NO_XML.sub("?", text)
