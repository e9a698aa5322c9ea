"""Counts the floating-point operations of a step, from one recorded step."""
