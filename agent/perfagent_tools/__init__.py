"""`perfagent bench` measures techniques, `perfagent demo` trains a small model. No training process loads this package."""
