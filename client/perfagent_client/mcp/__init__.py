"""`perfagent mcp`: what AI agents may ask of runs, over the Model Context Protocol. Read only."""
