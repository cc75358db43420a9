"""A training step of the phone's page in Chromium, with one WebAssembly thread and with more, by turns.

    python -m tests.benches.phone_page [--models digits-mlp wecfl-cnn] [--threads 1 2] [--rounds 3]

`difference` is that of the program's golden run from torch's. Times are medians of wall ms per step of the golden run's
batch; `CPU` is that of all of the browser's processes, per step. `--ort FOLDER --module ort.webgpu.min.mjs --provider
webgpu` measures another build of ONNX Runtime Web; `--flag` hands the browser what its adapter needs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_client.protocol.messages import canonical_json
from tests.support.browser import FLAGS, find_chromium
from tests.support.node import ROOT, third_party
from tests.support.programs import compiled

STEPS = 60
ISOLATED = ((b"cross-origin-opener-policy", b"same-origin"), (b"cross-origin-embedder-policy", b"require-corp"))
MEASURE = """async ({ folder, module, provider, threads, steps }) => {
  const ort = await import(`/third/${module}`);
  Object.assign(ort.env.wasm, { numThreads: threads, wasmPaths: new URL("/third/", location).href });
  const { openEngine } = await import("/web/engines/onnx.js");
  const { goldenInputs, runGolden } = await import("/web/engines/golden_run.js");
  const { readProgram } = await import("/web/protocol/program.js");
  const read = async (name) => new Uint8Array(await (await fetch(`${folder}/${name}`)).arrayBuffer());
  const create = (data, options) => ort.InferenceSession.create(data, { ...options, executionProviders: [provider] });
  const program = await readProgram(await read("program.json"));
  const engine = await openEngine({ ...ort, InferenceSession: { create } }, program, { step: await read("step.onnx") });
  const golden = program.golden.onnx;
  const difference = await runGolden(engine, golden);
  const { start, steps: [fresh] } = goldenInputs(program, golden, engine.fixedBatch !== null);
  const update = engine.update(start);
  const took = [];
  for (let k = 0; k < steps; k += 1) {
    const began = performance.now();
    await update.step(fresh);
    took.push(performance.now() - began);
  }
  return {
    difference, took: took.slice(5), batch: golden.batch, isolated: crossOriginIsolated,
  };
}"""


def isolated(app: ASGIApp) -> ASGIApp:
    """The headers without which a page has no threads."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *ISOLATED]
            await send(message)

        await app(scope, receive, sent)

    return answer


@contextlib.contextmanager
def served(made: Path, ort: Path) -> Iterator[str]:
    """The page's modules, a build of ONNX Runtime Web and the programs, on a server of its own."""
    folders = {"/web": ROOT / "edge_client" / "web", "/third": ort, "/made": made}
    routes = [Mount(path, StaticFiles(directory=folder)) for path, folder in folders.items()]
    app = Starlette(routes=routes, middleware=[Middleware(isolated)])
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as opened:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none"))
        threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True).start()
        yield f"http://127.0.0.1:{opened.getsockname()[1]}"
        server.should_exit = True


def cpu_s() -> float:
    """CPU seconds of this process's children so far."""
    used = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used += times.user + times.system
    return used


def main() -> None:
    """Measure, and print a Markdown table."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["digits-mlp", "wecfl-cnn"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ort", type=Path, default=None)
    parser.add_argument("--module", default="ort.wasm.min.mjs")
    parser.add_argument("--provider", default="wasm")
    parser.add_argument("--flag", action="append", default=[])
    options = parser.parse_args()
    wall, cpu, facts = defaultdict[Any, list[float]](list), defaultdict[Any, list[float]](list), dict[Any, Any]()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for name in options.models:
            made = compiled(name, engines=("onnx",))
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "program.json").write_bytes(canonical_json(made.program.to_json()))
            step = made.program.files("onnx", ("step",))["step"]
            (Path(folder) / name / "step.onnx").write_bytes(made.files[step.sha256])
        url = stack.enter_context(served(Path(folder), options.ort or third_party()))
        browsers = stack.enter_context(sync_playwright()).chromium
        flags = [*(flag for flag in FLAGS if not (options.flag and flag == "--disable-gpu")), *options.flag]
        browser = browsers.launch(executable_path=find_chromium(), headless=True, args=flags)
        for _ in range(options.rounds):
            for name in options.models:
                for threads in options.threads:
                    page = browser.new_page()
                    page.goto(f"{url}/web/index.html")
                    before_s = cpu_s()
                    asked = {"folder": f"/made/{name}", "module": options.module, "provider": options.provider}
                    got = page.evaluate(MEASURE, asked | {"threads": threads, "steps": STEPS})
                    wall[name, threads] += got.pop("took")
                    cpu[name, threads].append(1000 * (cpu_s() - before_s) / STEPS)
                    facts[name, threads] = got
                    page.close()
        browser.close()
    sys.stdout.write(f"load {os.getloadavg()[0]:.0f}, {os.cpu_count()} cores; {options.provider}, {options.module}\n\n")
    sys.stdout.write("| model | batch | threads | ms a step | CPU ms a step, opening included | difference |\n")
    sys.stdout.write("|---|---|---|---|---|---|\n")
    for (name, threads), got in facts.items():
        median, used = statistics.median(wall[name, threads]), statistics.median(cpu[name, threads])
        row = [name, got["batch"], threads, f"{median:.2f}", f"{used:.1f}", f"{got['difference']:.0e}"]
        sys.stdout.write(f"| {' | '.join(map(str, row))} |\n")


if __name__ == "__main__":
    main()
