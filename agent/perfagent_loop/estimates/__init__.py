"""How much memory a training needs, worked out before it begins: `perfagent.estimate_memory` and `perfagent
estimate`."""
