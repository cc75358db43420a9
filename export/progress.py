"""What a long command works on now. A logger, so that no function between the work and the command passes it on."""

from __future__ import annotations

import logging

from export.silence import write_stderr

log = logging.getLogger("fedcenters.progress")


def tell(part: str) -> None:
    """Something begins that takes seconds: `part` is a line for people, as "compiling onnx step"."""
    log.info(part)


def show_progress() -> None:
    """From now on each part is a line on stderr. For the command that is typed; calling it again changes nothing."""
    if not log.handlers:
        log.addHandler(_StderrLines())
        log.setLevel(logging.INFO)
        log.propagate = False


class _StderrLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        write_stderr(record.getMessage())
