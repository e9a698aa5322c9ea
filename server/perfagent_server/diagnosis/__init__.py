"""Judges runs that were read from files with the rules, and lists what the rules cannot judge. No database, no HTTP."""
