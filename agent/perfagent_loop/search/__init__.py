"""Searches that try things out: the batch size that fits, the number of workers that pays, and `perfagent tune`."""
