"""What questions about a run cost while the compactor has not come to its newest frames: the run has a long tail.

    PYTHONPATH=benchmarks python benchmarks/store/tail.py [--quick] [--ranks 512] [--seconds 0,30,120] [--write]

Each rank sends a frame of 63 series and one row every second, for a minute that is compacted, then for `--seconds`
seconds that stay in the tail. In the last line the job has started again, from a step of that minute, and has sent no
rows yet. A figure is the median CPU time of the process over several tries. --write puts the table into
docs/evidence/benchmarks.md.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tables

from perfagent.wire import PHASES, Event, Frame, Group
from perfagent_server.database import open_database
from perfagent_server.runs.figures import Figures
from perfagent_server.settings import Settings
from perfagent_server.store.sql import SqlStore
from perfagent_server.store.write.compaction import Compactor

START = 1_790_000_000.0
COMPACTED_S = 60
_PHASES = tuple(f"phase/{phase}_s" for phase in PHASES)
_NAMES = ("loss", "lr", "step_time_s", *_PHASES, *(f"metric/{place}" for place in range(60 - len(_PHASES))))
QUESTIONS: dict[str, Callable[[SqlStore], Any]] = {
    "latest": lambda store: store.latest("run"),
    "series": lambda store: store.series("run", "loss"),
    "series of a rank": lambda store: store.series("run", "loss", rank=0),
    "ranks": lambda store: store.ranks("run", "step_time_s"),
    "timing": lambda store: Figures(store.database, store).newest("run", 1000),
}


def frame(rank: int, second: int) -> Frame:
    """One step of a rank."""
    values = {name: [0.01 * place + 0.001 * (rank + second)] for place, name in enumerate(_NAMES)}
    at = START + second
    return Frame(
        project="bench", run="run", source=f"rank{rank}", attempt=1, rank=rank, seq=second + 1,
        groups=[Group([second], [at], [at], values)],
    )  # fmt: skip


def restart(store: SqlStore, seconds: int) -> None:
    state = Event(kind="state", time=START + seconds, data={"state": "starting", "start_step": COMPACTED_S // 2})
    again = Frame(project="bench", run="run", source="again", attempt=2, rank=0, seq=1, events=[state])
    store.database.write(lambda connection: store.append_in(connection, [again], START + seconds))


def fill(store: SqlStore, ranks: int, seconds: range) -> None:
    for second in seconds:
        frames = [frame(rank, second) for rank in range(ranks)]
        store.database.write(
            lambda connection, frames=frames, at=START + second: store.append_in(connection, frames, at)  # type: ignore[misc]
        )


def cpu_ms(ask: Callable[[], Any], tries: int) -> float:
    spent = []
    for _ in range(tries + 1):
        before = time.process_time()
        ask()
        spent.append(1e3 * (time.process_time() - before))
    return statistics.median(spent[1:])  # the first reads pages that the others find in memory


def measure(ranks: int, lengths: list[int], tries: int) -> dict[str, list[float]]:
    """Tail in words -> CPU ms of each question."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="perfagent-bench-") as folder:
        database = open_database(Settings(data=Path(folder)))
        store = SqlStore(database)

        def ask_all(words: str) -> None:
            found[words] = [cpu_ms(lambda ask=ask: ask(store), tries) for ask in QUESTIONS.values()]  # type: ignore[misc]
            print(f"  {words}: {found[words]}", file=sys.stderr)

        try:
            fill(store, ranks, range(COMPACTED_S))
            Compactor(database, rules_enabled=False).run_once(everything=True)
            for before, length in itertools.pairwise([0, *lengths]):
                fill(store, ranks, range(COMPACTED_S + before, COMPACTED_S + length))
                ask_all(f"{length} s")
            restart(store, COMPACTED_S + lengths[-1])
            ask_all(f"{lengths[-1]} s, started again")
        finally:
            database.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="32 ranks: to see that it works, not to quote")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--seconds", default="0,30,120", help="lengths of the tail, rising, with commas between")
    parser.add_argument("--write", action="store_true", help="put the table into docs/evidence/benchmarks.md")
    arguments = parser.parse_args()
    ranks = arguments.ranks or (32 if arguments.quick else 512)
    lengths = sorted(map(int, arguments.seconds.split(",")))
    found = measure(ranks, lengths, 3 if arguments.quick else 7)
    head = ["tail of", *(f"{name} ms" for name in QUESTIONS)]
    rows = [[words, *map(tables.figure, costs)] for words, costs in found.items()]
    text = f"{tables.machine('sqlalchemy', 'numpy')}. {ranks} ranks.\n\n{tables.table(head, rows)}"
    print(text)
    if arguments.write:
        tables.replace("tail", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
