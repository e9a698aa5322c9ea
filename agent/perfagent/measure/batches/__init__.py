"""Contents of a batch, from its tensors: used by the hooks of the agent and by `perfagent.inspect_batches`."""
