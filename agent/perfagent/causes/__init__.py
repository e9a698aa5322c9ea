"""Finds root causes, only when something is wrong or the server asks: where a NaN came from, what filled the memory,
what every thread is doing, what a few steps consist of.

Nothing here runs in a healthy step or is imported before it is needed.
"""
