"""Describes the step in progress: its state, the trace that the training thread writes, and the row that a
step becomes.

Nothing here patches torch. `hooks` writes these on the training thread, and `decode` reads them on the sender's thread.
"""
