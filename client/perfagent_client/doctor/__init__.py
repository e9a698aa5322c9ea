"""`perfagent doctor`: what a training on this machine will find, and what to do about what is missing."""
