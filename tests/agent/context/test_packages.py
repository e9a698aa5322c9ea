"""Which packages are installed, and in which version."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_recorded import Recording
from canaries import BY_VALUE

import perfagent
from perfagent.context.packages import installed


def test_the_first_on_the_path_counts_and_odd_folders_do_no_harm(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    (first / "My_Package-1.0.dist-info").mkdir(parents=True)
    (second / "my.package-2.0.dist-info").mkdir(parents=True)
    (second / "old-0.5-py3.11.egg-info").mkdir()
    (second / "linked.egg-info").mkdir()
    (second / "linked.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: linked\nVersion: 3.1.dev0\n")
    (second / "broken.dist-info").mkdir()
    *_, found = installed([str(first), str(second), str(tmp_path / "none"), str(tmp_path / "x.zip")])
    assert found == {"my-package": "1.0", "old": "0.5", "linked": "3.1.dev0"}


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
