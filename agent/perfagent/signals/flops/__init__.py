"""How many floating-point operations a step does, read from one recorded step."""
