"""Turns the traces of finished steps into rows, on the sender's thread. Imports no hook and no torch."""
