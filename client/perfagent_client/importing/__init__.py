"""Brings old runs into a server: `history` reads them, this package sends them as an agent sends its own."""
