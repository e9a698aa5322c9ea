"""Readers of the files of other trackers and trainers: one module per format. No reader needs the tracker that wrote the file.

A reader finds its files in a folder and returns each run: settings, exact series, and a sentence for everything that it left
out. A truncated or damaged file is read up to the damage.
"""

from __future__ import annotations

from perfagent_client.history.finding import find_runs, of_database
from perfagent_client.history.old_run import OldRun, Samples

__all__ = ["OldRun", "Samples", "find_runs", "of_database"]
