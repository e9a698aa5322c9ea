"""Which charts there are, and figures that the server draws. No request, no clock, no Dash."""
