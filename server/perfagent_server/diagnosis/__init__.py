"""Judges runs that files tell of: what rules find in them, and what they cannot judge for lack of data. No database, no HTTP."""
