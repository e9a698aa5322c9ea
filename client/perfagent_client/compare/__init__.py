"""Runs beside each other, as the server compares them: `perfagent compare`, and what the page says with it."""
