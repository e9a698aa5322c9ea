"""Commands that a training process never loads: `perfagent bench` measures techniques, `perfagent demo` trains a small model."""
