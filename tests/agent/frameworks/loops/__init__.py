"""Training loops as people write them, one function each; job.py runs one, once without the agent and once with it.

A loop takes a `Script`: it calls `script.attach(...)` where its author would have put that line, and after every
optimizer step tells the truth about that step with `script.step(...)`, from its own figures.
"""
