"""Writes results for CI systems: SARIF 2.1.0 (https://docs.oasis-open.org/sarif/sarif/v2.1.0/) and JUnit XML."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from perfagent import __version__

__all__ = ["SARIF_LEVELS", "Failure", "TestCase", "junit", "located", "sarif"]

SARIF_LEVELS = {"info": "note", "warning": "warning", "critical": "error"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_NO_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def sarif(tool: str, rules: Sequence[Mapping[str, Any]], results: Iterable[Mapping[str, Any]]) -> str:
    """rules: of the tool, each with its `id`. results: each with `ruleId`, `level`, `message` and what `located` gives."""
    driver = {"name": tool, "version": __version__, "rules": [*rules]}
    runs = [{"tool": {"driver": driver}, "results": [*results]}]
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": runs}, indent=1)


def located(path: Path) -> dict[str, Any]:
    """The fields that place a result at the first line of a file. GitHub refuses a result without them
    (https://docs.github.com/en/code-security/code-scanning/integrating-with-code-scanning/sarif-support-for-code-scanning)."""
    artifact = {"artifactLocation": {"uri": _uri(path)}, "region": {"startLine": 1}}
    return {"locations": [{"physicalLocation": artifact}]}


def _uri(path: Path) -> str:
    """Relative to the root of the repository, or else to the working directory, where it lies below it."""
    file = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would leave the repository through a link
    root = next((one for one in file.parents if (one / ".git").exists()), Path.cwd())
    return quote(file.relative_to(root).as_posix()) if file.is_relative_to(root) else file.as_uri()


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
