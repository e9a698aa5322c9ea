"""Where the agent touches the user's process: what it raises ends here, what it patches can be taken out again, and torch.compile
passes it by. Knows nothing of steps, runs or delivery.
"""
