"""Which packages are installed, and in which version."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_recorded import Recording
from canaries import BY_VALUE

import perfagent


def test_a_version_is_shown_whatever_its_package_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("authlib", "google_auth", "oauthlib", "requests_oauthlib", "python_jwt", "secretstorage")
    secret = BY_VALUE["hf"]
    for folder in (*(f"{name}-1.3.0" for name in names), f"odd-1.0+{secret}"):
        (tmp_path / "site" / f"{folder}.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    perfagent.init(record=tmp_path / "record", config={"packages": {"authlib": "open sesame"}})
    perfagent.finish()
    told = Recording(tmp_path / "record").events("context")
    packages = next(context["packages"] for context in reversed(told) if "packages" in context)
    assert {packages[name.replace("_", "-")] for name in names} == {"1.3.0"}
    assert (secret in str(told), "open sesame" in str(told)) == (False, False)
