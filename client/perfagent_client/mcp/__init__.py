"""`perfagent mcp`: a read-only server of the Model Context Protocol, for AI agents."""
