"""Calls of a script: arguments and their errors, configuration, names of other trackers, what a run shows."""
