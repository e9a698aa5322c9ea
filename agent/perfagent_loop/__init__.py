"""Loop utilities: fast, safe training on torch itself. Each module works alone.

The public names (`perfagent.loop`, `perfagent.zero_config`, ...) are resolved by the package's lazy table."""
