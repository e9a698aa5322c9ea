"""Whether a new run is slower or sicker than the one before: `perfagent gate`."""
