"""Modules import one another in one direction. import-linter checks the layers; this checks single files."""

from __future__ import annotations

import grimp
import pytest

LARGEST = 3


def imports_of(package: str) -> grimp.ImportGraph:
    """Imports inside functions count, those for type checking do not."""
    return grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)


def largest_circle(graph: grimp.ImportGraph) -> list[str]:
    """The most modules each of which imports, directly or not, all the others."""
    importers = {module: graph.find_downstream_modules(module) for module in graph.modules}
    circles = ([module, *(one for one in found if module in importers[one])] for module, found in importers.items())
    return max(circles, key=len)


def test_at_most_three_agent_modules_import_in_a_circle() -> None:
    graph = imports_of("perfagent")
    circle = largest_circle(graph)
    assert len(circle) <= LARGEST, circle
    graph.add_import(importer="perfagent.wire.frame", imported="perfagent.session")
    assert len(largest_circle(graph)) > LARGEST  # such a circle is seen


@pytest.mark.parametrize("package", ["perfagent_server", "perfagent_client", "perfagent_dashboard"])
def test_no_modules_of_the_others_import_one_another_in_a_circle(package: str) -> None:
    assert len(largest_circle(imports_of(package))) == 1
