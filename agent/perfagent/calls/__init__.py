"""What a script calls and hands in: arguments and their errors, configuration, names of other trackers, what a run shows."""
