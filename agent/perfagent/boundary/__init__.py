"""Keeps the agent from disturbing the user's process: exceptions of a hook end here, every patch can be removed, and
torch.compile does not trace the agent. Knows nothing of steps, runs or delivery."""
