"""`perfagent doctor`: a line for each check, and what to do about each that is not ok."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from perfagent import __version__
from perfagent.agent_config import AgentConfig
from perfagent.command_line.option_types import add_server_options
from perfagent.endpoint.local_server import data_folder, found_server, server_address, stopped_server
from perfagent.errors import ConfigError
from perfagent.process.variables import misspelt
from perfagent_client.doctor import connection, machine, storage
from perfagent_client.doctor.checks import Check
from perfagent_client.doctor.probes import has_driver, probe

__all__ = ["command", "examine"]


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check this machine and the connection: Python, torch, GPUs, allocator, settings, spool, server, key, "
        "clock, disk. The exit code is 1 if a check finds a problem, else 0."
    )
    add_server_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    checks = []
    address = server_address(arguments.server, arguments.data) if arguments.server or arguments.data else None
    for check in examine(address):
        checks.append(check)
        if not arguments.json:
            print(_line(check), flush=True)
    problems = sum(check.grade == "problem" for check in checks)
    if arguments.json:
        print(json.dumps({"ok": not problems, "checks": [dataclasses.asdict(check) for check in checks]}))
    return 1 if problems else 0


def examine(address: str | None = None) -> Iterator[Check]:
    """All checks, in the order in which they are to be read; what takes long is begun together, first."""
    try:
        config: AgentConfig | ConfigError = AgentConfig.from_env(server=address)
    except ConfigError as error:
        config = error
    wanted = isinstance(config, ConfigError) or config.tune_malloc
    with ThreadPoolExecutor() as pool:
        of_torch, of_nvml = pool.submit(probe, "torch"), pool.submit(probe, "nvml")
        asked = (
            pool.submit(connection.ask_server, config.server, config.api_key)
            if isinstance(config, AgentConfig)
            else None
        )
        yield machine.python(sys.version_info[:3], sys.executable, sys.platform)
        yield machine.torch_build(of_torch.result(), has_driver())
        yield machine.gpus(of_nvml.result())
        yield machine.allocator(platform.libc_ver(), os.environ, wanted=wanted)
        yield _settings(config)
        if isinstance(config, ConfigError) or asked is None:
            return
        root = config.state_dir / "spool"
        yield storage.spool(root, config.server)
        found = asked.result()
        stopped = stopped_server(config.server)
        yield connection.server(config.server, found, __version__, own=found_server(), stopped=stopped)
        yield connection.key(config.api_key is not None, found)
        yield connection.clock(found)
        for name, folder in (("disk of spool", root), ("disk of server", data_folder())):
            yield storage.disk(name, folder)


def _settings(config: AgentConfig | ConfigError) -> Check:
    if isinstance(config, ConfigError):
        step = "mend that variable or option; docs/reference/settings.md has all of them"
        return Check("settings", "problem", str(config), step)
    wrong = misspelt(os.environ)
    if wrong:
        return Check("settings", "warning", "; ".join(wrong), "rename the variable, or unset it")
    if config.disabled:
        return Check("settings", "warning", "PERFAGENT_DISABLED is set: nothing is recorded", "unset it to record")
    given = sorted(name for name in os.environ if name.startswith("PERFAGENT_"))
    return Check("settings", "ok", ", ".join(given) if given else "defaults")


def _line(check: Check) -> str:
    line = f"{check.grade:<8} {check.name:<15} {check.found}"
    return f"{line}\n{'':<8} {'':<15} -> {check.next_step}" if check.next_step else line
