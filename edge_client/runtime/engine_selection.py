"""Which engine trains a program on this device: the configured one, else one that is installed and computes correctly.

An engine that fails the program's golden run (golden_results.py) gives way to the next one. The presence message
tells which runtimes were refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from edge_client.engines.runtime_versions import runtime_version
from edge_client.errors import ProgramRefused, RuntimeMissing
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.program import ENGINES, Program
from edge_client.runtime.golden_results import RefusedRuntime
from edge_client.runtime.session import ClientLoop, Session
from edge_client.runtime.task_runner import TaskRunner

log = logging.getLogger(__name__)


def select_engine(
    runner: TaskRunner,
    session: Session,
    manifest: Manifest,
    functions: Collection[str],
    fetch: Callable[[list[Manifest]], ClientLoop],
) -> ClientLoop:
    """Fetch the containers of the first engine that passes the program's golden run, and let `runner` use it.

    The program of `manifest` is in the cache. Raises RuntimeMissing if no engine passes, and what opening the
    configured engine raises.
    """
    program, refused, selected = runner.program(manifest), list[RefusedRuntime](), None
    before = (runner.engine_name, runner.refused)
    for name in candidate_engines(program, runner.config.engine):
        files = runner.containers(program, name, functions, manifest.block)
        session.cache.pinned = {manifest.sha256, *(file.sha256 for file in files)}
        yield from fetch(files)
        try:
            failed = runner.use(program, name, manifest.sha256)
        except (RuntimeMissing, ProgramRefused) as wrong:
            if not refused:
                raise
            log.warning("%s cannot take the place of %s: %s", name, refused[0].engine, wrong.message)
            continue
        if failed is None:
            selected = name
            break
        refused.append(failed)
    runner.refused = refused
    if (runner.engine_name, refused) != before:
        session.announce()
        for each in refused:
            log.warning("%s; %s", each, "no other engine is left" if selected is None else f"using {selected}")
    if selected is None:
        raise refused[0].error()


def candidate_engines(program: Program, configured: str) -> list[str]:
    """The configured engine, then each installed one that the program has a golden run for.

    No other engine takes the place of a configured one that has no golden run.
    """
    others = [name for name in ENGINES if name != configured and name in program.golden and runtime_version(name)]
    return [configured, *others] if configured in program.golden else [configured]
