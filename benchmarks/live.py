"""What a live page costs: WebSocket messages and bytes per second while a job trains, one page open on its run.

    PYTHONPATH=benchmarks python benchmarks/live.py [--seconds 30] [--quick] [--write]

The subscription is that of the run page: bands over ranks of every series of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # the server process is the tests' own

import tables
import websockets
from builders import ServerProcess, job_environment, server_process, until

JOB = Path(__file__).resolve().with_name("nan_job.py")


async def listen(server: ServerProcess, run: str, seconds: float) -> tuple[int, int, int]:
    """(messages, bytes, points) that a page receives."""
    messages = received = points = 0
    async with websockets.connect(server.url.replace("http", "ws") + "/ws/live", proxy=None, max_size=None) as socket:
        await socket.send(json.dumps({"subscribe": {"runs": [run], "names": [], "bands": True}}))
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                message = await asyncio.wait_for(socket.recv(), left)
            except TimeoutError:
                break
            messages += 1
            received += len(message if isinstance(message, bytes) else message.encode())
            content = json.loads(message)
            points += sum(len(item["step"]) for kind in ("samples", "bands") for item in content.get(kind, ()))
    return messages, received, points


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    seconds = options.seconds or (8.0 if options.quick else 30.0)
    with tempfile.TemporaryDirectory(prefix="perfagent-live-") as folder, server_process(Path(folder) / "server") as server:
        variables = job_environment(Path(folder), PERFAGENT_SERVER=server.url, PERFAGENT_RUN_ID="live")
        job = subprocess.Popen([sys.executable, str(JOB), "1000000", "0"], env=variables, stdout=subprocess.DEVNULL)
        try:
            until(lambda: (server.find("/runs/live") or {"step": 0})["step"], within_s=60.0)
            before = server.get("/runs/live")["step"]
            messages, received, points = asyncio.run(listen(server, "live", seconds))
            steps = server.get("/runs/live")["step"] - before
        finally:
            job.terminate()
            job.wait()
    text = (
        f"{tables.machine()}. One page on a run of {steps / seconds:.0f} steps a second, all its series subscribed: "
        f"{messages / seconds:.1f} WebSocket messages and {received / seconds / 1000:.1f} kB a second, "
        f"{received / max(1, messages) / 1000:.2f} kB a message, {received / max(1, points):.1f} bytes a point. "
        "No figure is polled."
    )
    print(text)
    if options.write:
        tables.replace("live", text)
    return 0 if messages and points else 1


if __name__ == "__main__":
    sys.exit(main())
