# PYTHON_ARGCOMPLETE_OK
"""`python -m perfagent` is the same as the `perfagent` command (launchers such as torchrun take a module)."""

from perfagent.cli import main

if __name__ == "__main__":
    main()
