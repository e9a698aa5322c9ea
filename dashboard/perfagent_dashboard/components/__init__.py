"""Parts that several pages use. Each is a function of data that gives a Dash component."""
