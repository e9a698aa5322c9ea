"""Counts the floating-point operations of a step from one recorded step. On the sender's thread."""
