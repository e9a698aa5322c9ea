from __future__ import annotations

from frames import frame, state

from perfagent_server.runs.run_filters import TableQuery
from perfagent_server.runs.run_queries import PAGE_CHARACTERS, Runs

CONFIG_CHARACTERS = 250_000


def test_a_page_of_runs_with_large_configurations_has_fewer_runs_and_the_rest_follows(shelf) -> None:
    runs = [f"r{number:02}" for number in range(40)]
    config = {"layers": "x" * CONFIG_CHARACTERS}
    for run in runs:
        shelf.append(frame(1, state("starting", config=config), run=run))
    pages = Runs(shelf.database)
    first, cursor = pages.page(TableQuery(limit=1000, parts=()))
    assert len(first) == PAGE_CHARACTERS // (CONFIG_CHARACTERS + 20)
    rest, end = pages.page(TableQuery(limit=1000, parts=()), cursor)
    assert [summary.run for summary in first + rest] == runs[::-1]
    assert end is None
