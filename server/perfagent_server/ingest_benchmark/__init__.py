"""`perfagent bench ingest`: how many agents a server serves, measured over HTTP with simulated ones."""
