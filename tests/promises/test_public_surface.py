"""What we promise about names and imports."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import pickle
import subprocess
import sys
import types

import pytest

import perfagent
import perfagent.wire

ROOT = pathlib.Path(__file__).parents[2]
HEAVY = {"torch", "httpx", "pynvml", "psutil", "pydantic", "fastapi", "sqlalchemy", "dash", "numpy", "plotly"}


def run_python(code: str, **environment: str) -> str:
    env = os.environ | environment
    return subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, env=env).stdout


@pytest.mark.real
def test_importing_the_agent_is_light_and_starts_nothing() -> None:
    code = "import sys, threading, perfagent, perfagent.wire; print(threading.active_count(), *sys.modules)"
    threads, *loaded = run_python(code, PERFAGENT_SERVER="not a url", PERFAGENT_RECORD="/does/not/exist").split()
    assert threads == "1"
    assert not HEAVY & set(loaded)


@pytest.mark.parametrize("module", ["perfagent", "perfagent.wire", "perfagent.errors"])
def test_every_public_name_resolves_and_nothing_else_is_public(module: str) -> None:
    loaded = importlib.import_module(module)
    for name in loaded.__all__:
        assert getattr(loaded, name) is not None
    own = {
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", module).startswith("perfagent")
    }
    assert own - {"TYPE_CHECKING", "annotations", "Any"} <= set(loaded.__all__)


def test_a_misspelt_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match="attach"):
        _ = perfagent.atach


def test_a_function_that_names_the_package_can_be_pickled() -> None:
    """Ray and others pickle the globals of a function by value."""
    assert pickle.loads(pickle.dumps({"perfagent": perfagent})) == {"perfagent": perfagent}


def test_no_module_bears_the_name_of_a_public_function() -> None:
    modules = {path.stem for path in (ROOT / "agent" / "perfagent").iterdir() if not path.name.startswith("_")}
    assert not modules & set(perfagent.__all__)


@pytest.mark.real
def test_the_wire_needs_only_the_standard_library_and_msgspec() -> None:
    code = (
        "import sys, json; before = set(sys.modules); import perfagent.wire; "
        "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))))"
    )
    # msgspec takes typing_extensions where it is there
    assert set(json.loads(run_python(code))) <= {"msgspec", "perfagent", "typing_extensions"}


@pytest.mark.real
def test_agent_does_not_load_what_only_servers_and_readers_need() -> None:
    loaded = run_python("import sys, perfagent.delivery.send_loop; print(*sys.modules)").split()
    assert "perfagent.wire.query" not in loaded
    assert run_python("from perfagent.wire import *; print(RunSummary.__module__)").split() == ["perfagent.wire.query"]
