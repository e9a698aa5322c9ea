"""Runs that other programs wrote down: one reader a format, each without the tracker that wrote it.

A reader finds its files in a folder and reads each run with its settings, its series exactly as they were written, and a
sentence for what it could not take. What is cut or damaged is read as far as it is whole.
"""

from __future__ import annotations

from perfagent_client.history.finding import find_runs
from perfagent_client.history.old_run import OldRun, Samples

__all__ = ["OldRun", "Samples", "find_runs"]
