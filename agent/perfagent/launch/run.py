"""`perfagent run SCRIPT ...`: becomes a fresh Python that runs the script as if it had been called without us.

The process replaces itself (execv), so the script keeps the pid, the terminal, the exit code, and sees the same argv,
path, `__main__` and tracebacks; a hook at interpreter start-up (startup/sitecustomize.py) takes itself out again and
waits for torch. A watcher is forked off before, to see how it ends (watcher.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from perfagent.agent_config import AgentConfig
from perfagent.errors import ConfigError, ResourceError
from perfagent.identity import Identity
from perfagent.launch.words import as_python_takes_them, is_launcher, leading_options
from perfagent.libraries import WORKERS_HAVE
from perfagent.process.launch_options import VARIABLE, LaunchOptions, Start

__all__ = ["command", "start"]


def command(parser: argparse.ArgumentParser) -> None:
    given = "[--project P] [--name N] [--tag T] [--record DIR] [--run-id ID]"
    parser.usage = f"perfagent run {given} SCRIPT|-m MODULE [ARGS ...]"
    parser.description = "Run a training script under the monitor: same arguments, output, tracebacks and exit code."
    parser.add_argument("--project", help="project that the run belongs to")
    parser.add_argument("--name", help="name of the run")
    parser.add_argument(
        "--tag", action="append", default=[], metavar="TAG", help="a tag of the run, once or several times"
    )
    record = "record into this folder instead of sending; `perfagent sync DIR` sends it later"
    parser.add_argument("--record", metavar="DIR", help=record)
    run_id = "id of the run: the same id again is a new attempt of the same run"
    parser.add_argument("--run-id", metavar="ID", help=run_id)
    module = "run a module, as python -m does"
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help=module)
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the script and its arguments")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> NoReturn:
    words = ["-m", *arguments.module] if arguments.module else list(arguments.script)
    if words[:1] == ["--"]:
        words = words[1:]
    if not words or words == ["-m"]:
        raise ConfigError("a script, or -m and a module, must follow: `perfagent run --help` has the options")
    local_rank = getattr(arguments, "local_rank_argument", None)
    if local_rank:  # deepspeed and torch.distributed.launch put it in front of the script's own arguments
        words.insert(2 if words[0] == "-m" else 1, local_rank)
    record = str(Path(arguments.record).expanduser().absolute()) if arguments.record else None
    options = LaunchOptions(
        pid=os.getpid(), project=arguments.project, name=arguments.name, tags=tuple(arguments.tag), record=record,
        run_id=arguments.run_id,
    )  # fmt: skip
    start(words, options)


def start(words: list[str], options: LaunchOptions) -> NoReturn:
    """Replaces this process by `python *words` under the monitor. Raises ConfigError for a command that is not Python's."""
    given, words = as_python_takes_them(words)
    flags = [*_interpreter_flags(getattr(sys, "orig_argv", [])), *given]
    ignored = any(set("IE") & set(option) for option in given if not option.startswith(("--", "-W", "-X")))
    if sys.flags.ignore_environment or sys.flags.isolated or ignored:
        needed = "which the start-up hook needs; use perfagent.attach() instead"
        raise ConfigError(f"python -I and -E ignore PYTHONPATH, {needed}")
    config = AgentConfig.from_env(project=options.project, record=options.record, run_id=options.run_id)
    if config.disabled:
        os.execv(sys.executable, [sys.executable, *flags, *words])  # noqa: S606 - what the user asked for
    launcher = is_launcher(words)
    options.workers_have = ("LOCAL_RANK", *WORKERS_HAVE) if launcher else ()
    identity = Identity.from_environment(config, name=options.name, meet=False)
    if identity.world_size == 1 and not launcher:
        options.start = Start(identity.run, identity.attempt, identity.source)
    if not launcher and (words[0] == "-m" or Path(words[0]).exists()):
        from perfagent.launch.watcher import watch

        script = f"{words[1].rpartition('.')[2]}.py" if words[0] == "-m" else words[0]
        name = options.name or identity.default_name(
            config.run_id, script
        )  # where the script ends before it can send it
        options.watched = watch(config, identity, name=name, tags=options.tags)
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent / "startup"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, VARIABLE: options.text(), "PYTHONPATH": path}
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by whoever started us
            stream.flush()
    try:
        os.execve(sys.executable, [sys.executable, *flags, *words], environment)  # noqa: S606
    except OSError as error:
        raise ResourceError(f"python at {sys.executable!r} cannot be started: {error}") from error


def _interpreter_flags(original: list[str]) -> list[str]:
    """The options that the user gave to Python itself (python -u -m perfagent run ...).

    Only what stands there: subprocess's own list would turn environment variables into flags.
    """
    flags = leading_options(original[1:])  # "-um" joins -u and -m, as in `python -um perfagent`
    return [flag if flag.startswith(("-W", "-X", "--")) else flag.removesuffix("m") for flag in flags]
