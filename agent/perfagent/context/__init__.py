"""Collects what a run was started with and what it prints: command line, git, versions, environment, hyperparameters,
and the tail of its console.

Whatever leaves the process is redacted first, for all events alike (delivery/send_loop.py).
"""
