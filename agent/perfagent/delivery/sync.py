"""`perfagent sync [DIR ...]`: sends what was recorded offline and what dead processes left. Sending twice is harmless."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from perfagent.config import AgentConfig
from perfagent.delivery.spool import Spool, SpoolBusyError, folders
from perfagent.delivery.transport import HttpTransport, Transport, judge, packed
from perfagent.errors import ServerUnreachable, WireError
from perfagent.wire import encode

__all__ = ["Upload", "command", "upload"]

PATIENCE_S = 60.0


@dataclass(slots=True)
class Upload:
    """What became of one source's frames. complete: none is left; reason: why not."""

    frames: int = 0
    samples: int = 0
    duplicate: int = 0
    refused: int = 0
    complete: bool = False
    reason: str = ""


def upload(spool: Spool, transport: Transport, *, until: float) -> Upload:
    """Sends every frame of a spool, oldest first, until a point in (monotonic) time."""
    result = Upload()
    failures = 0
    jitter = random.Random()  # noqa: S311 - a pause, not a secret
    while (outgoing := spool.next()) is not None:
        left = until - time.monotonic()
        if left <= 0:
            result.reason = result.reason or "out of time"
            return result
        try:
            body, encoding = packed(encode(spool.frame(outgoing)), loopback=bool(getattr(transport, "loopback", True)))
            answer = judge(transport.post(body, encoding=encoding, deadline_s=min(10.0, left)))
        except WireError as error:
            spool.quarantine(outgoing.seq, str(error))
            result.refused += 1
            continue
        except ServerUnreachable as error:
            result.reason, pause = str(error), None
        else:
            if answer.kind == "acked":
                failures = 0
                result.frames += 1
                result.samples += answer.stored
                result.duplicate += answer.duplicate
                spool.ack(outgoing.seq)
                continue
            if answer.kind == "refused" or (answer.kind == "too_large" and not spool.split(outgoing.seq)):
                spool.quarantine(outgoing.seq, answer.reason)
                result.refused += 1
                continue
            if answer.kind == "too_large":
                continue
            result.reason, pause = answer.reason, answer.pause_s
            if answer.kind in ("unauthorized", "foreign"):
                return result
        failures += 1
        pause = pause if pause is not None else jitter.uniform(0.2, min(10.0, 0.5 * 2.0 ** min(failures, 5)))
        time.sleep(max(0.0, min(pause, until - time.monotonic())))
    result.complete, result.reason = True, ""
    return result


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = "Send recorded folders to the server; without DIR, what dead processes left in the spool. Idempotent."
    parser.add_argument(
        "folders", nargs="*", metavar="DIR", help="folder of PERFAGENT_RECORD, attach(record=...) or run --record"
    )
    parser.add_argument("--all", action="store_true", help="of the spool, also what was meant for another server")
    parser.set_defaults(run=_sync)


def _sync(arguments: argparse.Namespace) -> int:
    config = AgentConfig.from_env()
    transport = HttpTransport(config.server, config.api_key)
    given = [Path(folder) for folder in arguments.folders]
    missing = [folder for folder in given if not folder.is_dir()]
    if missing:
        _say(f"perfagent sync: {missing[0]} is no folder")
        return 2
    sources = _sources(given) if given else folders(config.state_dir / "spool")
    failed = sent = 0
    for folder in sources:
        try:
            spool = Spool.open(folder, recording=bool(given))
        except SpoolBusyError:
            _say(f"{folder.name}: still being written by a running process, skipped")
            continue
        except OSError as error:
            _say(f"{folder}: {error}")
            failed += 1
            continue
        if not given and spool.header.server not in (None, config.server) and not arguments.all:
            _say(f"{folder.name}: recorded for {spool.header.server}, skipped (--all sends it to {config.server})")
            spool.close()
            continue
        if not spool.header.run:
            # a rank that died before rank 0 told it the run's id: its samples get a run of their own rather than none
            attempt = max(1, int(spool.header.started * 1000))
            own = f"rank-{spool.header.source[:12]}"
            spool.identify(run=own, attempt=attempt, name=spool.header.name, project=spool.header.project)
        result = upload(spool, transport, until=time.monotonic() + PATIENCE_S)
        _say(_told(spool, result))
        sent += result.frames
        if not result.complete:
            failed += 1
        if result.complete and not given and not result.refused:
            spool.remove()
        else:
            spool.close()
    transport.close()
    if not sources:
        _say("nothing to send")
    return 1 if failed else 0


def _told(spool: Spool, result: Upload) -> str:
    text = f"{spool.header.run} rank {spool.header.rank}: {result.frames} frames, {result.samples} samples stored, "
    text += f"{result.duplicate} there already"
    if result.refused:
        text += f", {result.refused} refused (kept in {spool.folder / 'quarantine'})"
    elif (spool.folder / "quarantine").exists():
        text += f"; what the server had refused before is kept in {spool.folder / 'quarantine'}"
    return text if result.complete else f"{text}; not complete: {result.reason}"


def _sources(given: Iterable[Path]) -> list[Path]:
    """A recorded folder holds one folder a source; the folder of a single source will do too."""
    found: list[Path] = []
    for folder in given:
        inside = folders(folder)
        found.extend(inside or ([folder] if any(folder.glob("*.ticks")) or any(folder.glob("*.frames")) else []))
    return found


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
