"""A process that stores frames and prints each (source, seq) once it is acknowledged, until it is killed.

python kill_writer.py FOLDER DATABASE SOURCE FIRST_SEQ     DATABASE: a URL, empty for SQLite in the folder
"""

import sys
from pathlib import Path
from types import SimpleNamespace

from perfagent.wire import Frame, Group
from perfagent_server.database import open_database
from perfagent_server.ingest.group_commit import Ingest
from perfagent_server.store.sql import SqlStore
from perfagent_server.store.write.compaction import CompactionPolicy, Compactor

folder, url, source, first = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
database = open_database(SimpleNamespace(data=folder, database=url or None), reserve_bytes=1 << 12)
ingest = Ingest(SqlStore(database))
compactor = Compactor(database, rules_enabled=False, policy=CompactionPolicy(frames=3, pause_s=0.005))
compactor.start()
print("ready", flush=True)
for seq in range(first, 1_000_000):
    steps = list(range(seq * 4, seq * 4 + 4))
    group = Group(steps, [1.79e9 + step for step in steps], steps, {"loss": [float(seq)] * 4, "step_time_s": [0.1] * 4})  # type: ignore[arg-type]
    # ... and so many that they lie in bundles
    many = Group(steps, [1.79e9 + step for step in steps], steps, {f"many/{at}": [float(seq)] * 4 for at in range(40)})  # type: ignore[arg-type]
    frame = Frame(project="p", run="r", source=source, attempt=1, rank=0, seq=seq, groups=[group, many])
    ingest.accept_and_wait([frame])
    print(seq, flush=True)
