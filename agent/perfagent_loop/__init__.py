"""Loop utilities: fast, safe training on torch itself. Each module is usable alone; `import perfagent` loads none of
them.

The public names (`perfagent.loop`, `perfagent.zero_config`, ...) are resolved by the package's lazy table.
"""
