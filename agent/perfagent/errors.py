"""The errors of perfagent.

PerfagentError              the root: catch this to catch them all
├── ConfigError             an option, an argument or an environment variable has a value that cannot be used
│   └── ResourceError       ... not here or not now: the port is taken, the file is damaged, a package is missing
├── CheckpointError         a checkpoint could not be written, or does not fit what it is loaded into
├── WireError               bytes or values that are not what frame.py or query.py says
└── ServerUnreachable       the server refused, timed out or answered with something that is not its reply

Every message says what was given, what is allowed and what to do. Only misuse by the caller is raised into user code;
trouble of our own (no server, full disk) is counted and reported once by the sender instead.

A command that ends by such an error ends with its exit code: 2 for wrong use, whoever notices it, and 1 for the rest.

Stopped is no error: it ends a training that was stopped from afar, with exit code 0.
"""

__all__ = [
    "CheckpointError", "ConfigError", "PerfagentError", "ResourceError", "ServerUnreachable", "Stopped", "WireError",
    "how_to_install",
]  # fmt: skip


class PerfagentError(Exception):
    """The base class of all errors that perfagent raises."""

    exit_code = 1
    """Exit code of the command that it ends."""
    status = 0
    """HTTP status of the server's answer, where that is the error."""


class ConfigError(PerfagentError, ValueError):
    """An option, argument or environment variable has a value that cannot be used. Also a ValueError."""

    exit_code = 2


class ResourceError(ConfigError):
    """The value is an allowed one, and what it names cannot be used here or now: a port is taken, a file is damaged, a
    folder may not be written, a package is missing."""

    exit_code = 1


class CheckpointError(PerfagentError):
    """A checkpoint could not be written (the disk is full, a file was refused, another rank failed), or does not fit.

    Attributes:
        transient: True if the cause may pass by itself, so that another try may succeed.
    """

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient


class WireError(PerfagentError, ValueError):
    """Bytes or values from the network do not fit the wire format. Also a ValueError."""


class ServerUnreachable(PerfagentError):  # noqa: N818 - the name of the interface document
    """The server refused the connection, did not answer in time, or what answered is not a perfagent server."""


class Stopped(SystemExit):
    """The run was stopped from outside: by `perfagent stop`, on its page, or by a rule.

    `optimizer.step()` raises it at the end of the step that all ranks agreed on, in a script that called
    `attach(stoppable=True)`. It is a SystemExit with exit code 0: `except Exception` does not catch it, `finally` and
    `with` do their work, and a launcher does not start the job again.
    """

    def __init__(self, message: str) -> None:
        super().__init__(0)
        self.message = message

    def __str__(self) -> str:
        return self.message


def how_to_install(*extras: str) -> str:
    """The command for these extras of pyproject.toml. perfagent is on no package index yet: whoever has its name there
    could put a package of theirs onto a server that holds keys."""
    return f"in the checkout: pip install '.[{','.join(extras)}]'"
