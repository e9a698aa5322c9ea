"""The step in progress: its state, the trace that the training thread leaves of it, and what a row of it holds.

Nothing here patches torch; `hooks` fills it on the training thread and `decode` reads it on the sender's.
"""
