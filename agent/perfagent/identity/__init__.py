"""Identifies this process by run, attempt and rank.

Ranks come from the launcher's environment (launchers.py) or from an initialized torch.distributed. The run's id is the one
that the user or a job scheduler names; else rank 0 draws one and publishes it with its start time, in a file next to the
spool (ranks of the same node) and in the job's TCPStore (other nodes). The others look from their sender threads and spool
until they know (rendezvous.py). No collective is ever issued.
"""

from __future__ import annotations

from perfagent.identity.process import Identity

__all__ = ["Identity"]
