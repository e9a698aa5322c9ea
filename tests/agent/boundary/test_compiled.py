"""Whether anything was compiled that may call a module: hooks of ours must not meet the compiler."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn
from torch_versions import since_torch

from perfagent.boundary.dynamo import compiled
from perfagent.integrations import bitsandbytes
from perfagent.measure.dead_units import activations_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # inductor's own
    pytest.mark.usefixtures("nothing_compiled"),
]


def falling_back(function, **options):
    """As the library wraps its functions."""
    made = torch.compile(function, **options)

    def wrapper(*args):
        try:
            return made(*args)
        except Exception:
            return function(*args)

    return wrapper


@pytest.fixture
def library():
    """A module that compiled two functions when it was imported."""
    module = types.ModuleType("bitsandbytes.backends.default.ops")
    module.first = falling_back(lambda x: x + 1, dynamic=False)
    module.second = torch.compile(lambda x: x * 2)
    bitsandbytes.install(module, None)
    return module


@since_torch(2, 11, "a library's functions count like the script's")
def test_what_a_library_compiles_for_itself_does_not_count(library):
    assert not compiled()
    assert activations_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


def test_what_a_script_compiles_counts_until_it_is_reset():
    assert not compiled()
    torch.compile(lambda x: x + 1)
    assert compiled()
    torch._dynamo.reset()
    assert not compiled()


def test_a_compiler_that_everybody_shares_counts(library):
    library.third = torch.compile(lambda x: x * 3, backend="eager")
    assert compiled()
