"""What GitHub's code scanning requires of a SARIF file
(https://docs.github.com/en/code-security/reference/code-scanning/sarif-files/sarif-support: properties marked as required, and
limits). No package that is kept up ships the schema of SARIF 2.1.0 for use without a network."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["assert_shown"]

URI_REFERENCE = re.compile(r"(?:[A-Za-z0-9\-._~:/?@!$&'()*+,;=]|%[0-9A-F]{2})+")
DESCRIPTIONS = ("shortDescription", "fullDescription", "help")


def assert_shown(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Its results, once all that is required is there, is not empty, and is of its kind."""
    assert report["version"] == "2.1.0"
    [run] = report["runs"]
    rules = run["tool"]["driver"]["rules"]
    texts = [report["$schema"], run["tool"]["driver"]["name"]]
    for rule in rules:
        said = [rule[one]["text"] for one in DESCRIPTIONS]
        assert max(map(len, said[:2])) <= 1024 and len(rule["name"]) <= 255
        texts += [rule["id"], *said]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("note", "warning", "error")
        [location] = result["locations"]
        place, region = (location["physicalLocation"][one] for one in ("artifactLocation", "region"))
        assert URI_REFERENCE.fullmatch(place["uri"])
        assert min(region[one] for one in ("startLine", "startColumn", "endLine", "endColumn")) >= 1
        texts += [result["message"]["text"], result["partialFingerprints"]["primaryLocationLineHash"]]
    assert all(isinstance(text, str) and text for text in texts)
    assert len({rule["id"] for rule in rules}) == len(rules)
    return list(run["results"])
