"""Identifies this process by run, attempt and rank, and lets all ranks of a job agree on the run without waiting for
each other.

Ranks come from the launcher's environment (torchrun, deepspeed, SLURM, MPI: launchers.py) or from an initialized
torch.distributed. The run's id is the one the user or a real job scheduler names (slurm.py); else rank 0 draws one and
publishes it with its start time, in a file next to the spool (ranks of the same node) and in the job's TCPStore (other
nodes). The other ranks look from their sender threads, a `check()` that never waits, and spool until they know
(rendezvous.py). No collective is ever issued. A child of multiprocessing may join a group later than it attaches
(process_group.py).
"""

from __future__ import annotations

from perfagent.identity.process import Identity

__all__ = ["Identity"]
