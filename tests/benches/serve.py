"""`python -m tests.benches.serve`: requests per second and latency of `fedcenters-export serve`, small files.

The server is a process of its own; `wrk` (apt install wrk) asks for files of 1 kB and 30 kB and for which center is
nearest, 32 connections, each kind in turn, `--repeats` times. Prints a Markdown table of medians. The server's CPU
time per request is there too: on a busy machine it is the figure to trust, since latencies then measure the others.
Goal: 2,000 requests a second with 99 % of them under 50 ms.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from edge_client.errors import RuntimeMissing
from edge_client.run_cli import run_cli
from tests.benches.machine import described
from tests.support.served_bundle import ServerProcess, run_serve, write_bundle

CONNECTIONS = 32
SMALL, CENTER = 1_000, 30_000  # bytes: a card, and a center of the size of Fashion-MNIST's CNN in int8
POST = """
wrk.method = "POST"
wrk.body = '{"how": "loss", "losses": [0.4, 0.2]}'
wrk.headers["Content-Type"] = "application/json"
"""
UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}


def wrk(url: str, seconds: int, script: Path | None = None) -> tuple[float, float]:
    """-> requests per second, and the 99th percentile in ms."""
    command = ["wrk", "--latency", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s"]
    done = subprocess.run(
        [*command, *(["-s", str(script)] if script else []), url], check=True, capture_output=True, text=True
    )
    if "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise RuntimeError(done.stdout)
    rate, (value, unit) = re.search(r"Requests/sec:\s+([\d.]+)", done.stdout), _p99(done.stdout)
    if rate is None:
        raise RuntimeError(done.stdout)
    return float(rate[1]), float(value) * UNITS[unit]


def _p99(text: str) -> tuple[str, str]:
    found = re.search(r"99%\s+([\d.]+)(us|ms|s|m)\b", text)
    if found is None:
        raise RuntimeError(text)
    return found[1], found[2]


def measured(server: ServerProcess, path: str, seconds: int, script: Path | None) -> tuple[float, float, float]:
    """-> requests per second, 99th percentile in ms, the server's CPU milliseconds per request."""
    process = next(p for p in psutil.process_iter() if any(c.laddr.port == server.port for c in _listening(p)))
    before = sum(process.cpu_times()[:2])
    rate, p99 = wrk(f"http://127.0.0.1:{server.port}{path}", seconds, script)
    return rate, p99, 1000 * (sum(process.cpu_times()[:2]) - before) / (rate * seconds)


def _listening(process: psutil.Process) -> list[psutil._common.pconn]:
    try:
        return [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return []


def bench(repeats: int, seconds: int) -> None:
    """Everything; the table goes to stdout."""
    if shutil.which("wrk") is None:
        raise RuntimeMissing("wrk is not installed", hint="apt install wrk")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_bundle(folder / "small", "bench", large=SMALL)
        write_bundle(folder / "center", "bench", large=CENTER)
        (folder / "post.lua").write_text(POST)
        found: dict[str, list[tuple[float, float, float]]] = {}
        with run_serve(folder / "small", "--rate", "0") as small, run_serve(folder / "center", "--rate", "0") as center:
            paths = {s.port: s.ask("/centers").json["centers"][0]["files"]["onnx"]["url"] for s in (small, center)}
            plan = {
                "a file of 1 kB": (small, paths[small.port], None),
                "a file of 30 kB": (center, paths[center.port], None),
                "/nearest": (small, "/nearest", folder / "post.lua"),
            }
            for turn in range(repeats):
                for what, (server, path, script) in plan.items():
                    found.setdefault(what, []).append(measured(server, path, seconds, script))
                    sys.stderr.write(f"{turn} {what}: {found[what][-1]}\n")
    sys.stdout.write(
        f"{described()}\n\n| request | per second | 99 % under | server CPU per request |\n|---|---:|---:|---:|\n"
    )
    for what, rows in found.items():
        rate, p99, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
        sys.stdout.write(f"| {what} | {rate:,.0f} | {p99:.1f} ms | {cpu:.2f} ms |\n")


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5)
    args = parser.parse_args()
    return run_cli(lambda: bench(args.repeats, args.seconds))


if __name__ == "__main__":
    sys.exit(main())
