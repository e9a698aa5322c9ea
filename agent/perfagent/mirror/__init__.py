"""Writes what a run records in the formats of other programs."""
