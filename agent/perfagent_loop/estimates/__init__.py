"""Memory of a training, estimated before it begins: `perfagent.estimate_memory`, `perfagent estimate`."""
