"""Tries to command the terminal of who reads: every text that the network brings is printed without its escapes."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.status_in_words import status_lines
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.storage.status import read_status
from edge_client.doctor import CheckResult
from edge_client.errors import ProtocolError
from edge_client.nearest import cli as nearest_cli
from edge_client.nearest.result import NearestAnswer
from edge_client.printable import PrintableFormatter, printable, printable_line
from edge_client.protocol.messages import read_message, write_message
from edge_client.run_cli import run_cli
from edge_client.runtime.progress import format_device_event
from emulator.console import ConsoleProgress
from export.silence import write_stderr
from tests.support.virtual_federation import BALLAST
from tests.support.virtual_time import VirtualClock
from tests.support.wired_coordinator import WiredCoordinator

# a window title, red, an overwritten line, C1's CSI, text that runs backwards, a line that pretends to be ours
EVIL = "\x1b]0;owned\x07 \x1b[31mred\r\x9b2K \u202etxt\nerror: all is well\x7f"
FORBIDDEN = [chr(code) for code in (*range(9), *range(11, 32), *range(127, 160), 0x202E)]


def is_harmless(said: str, *, lines: int) -> bool:
    return not any(c in said for c in FORBIDDEN) and len(said.strip().splitlines()) == lines and "owned" in said


def test_a_refusal_in_a_message_reaches_neither_the_devices_lines_nor_its_log() -> None:
    payload = write_message("err", ident="x", t_ms=0, epoch=1, code="bad_field", detail=EVIL)
    detail = read_message(payload, "t")["detail"]
    assert detail == EVIL  # the protocol allows every character
    for event in (
        {"event": "answered", "round": 1, "of": 2, "job": "fit", "status": "rejected", "detail": detail},
        {"event": "refused", "round": 1, "of": 2, "code": "no_data", "detail": detail},
        {"event": "lost", "reason": detail},
    ):
        assert is_harmless(format_device_event(event), lines=1)
    record = logging.LogRecord("edge_client", logging.WARNING, "", 0, "the coordinator answers %s", (detail,), None)
    assert is_harmless(PrintableFormatter("%(name)s: %(message)s").format(record), lines=2)


def test_a_devices_refusal_reaches_no_terminal_of_the_operator(tmp_path: Path) -> None:
    key = ExchangeKey("run1", 1, 0)
    coordinator = WiredCoordinator(tmp_path, VirtualClock(), BALLAST, 4)
    coordinator.ask(key, None)
    coordinator.hear("d0", "nack", re=f"c{coordinator.sender.epoch}-1", code="no_data", detail=EVIL, **key._asdict())
    ((reason,),) = coordinator.store.database.rows("select reason from refusals where cid = 'd0'")
    coordinator.store.close()
    assert EVIL in reason
    run = {"name": "a", "method": "fesem", "round": 1, "of": 2, "accuracy": None, "seconds": None, "late": []} | {
        "secure": None,
        "asynchronous": None,
        "devices_per_center": None,
    }
    for error, lines_of_it in ((EVIL, 1), (f"{EVIL}\n\nhint: {EVIL}", 2)):
        found = read_status(tmp_path) | {"runs": [{**run, "refused": {"d0": reason}}], "error": error}
        lines = status_lines(found)
        assert is_harmless("\n".join(lines), lines=len(lines))
        assert len([line for line in lines if "owned" in line]) == lines_of_it + 1  # and of the refusal


def test_errors_checks_answers_and_progress_are_printed_without_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise ProtocolError(f"the site says {EVIL}", hint="ask its operator")

    assert run_cli(fail) == ProtocolError.exit_code
    write_stderr(EVIL)
    said = io.StringIO()
    ConsoleProgress(stream=said).say(EVIL)
    nearest_cli._print(NearestAnswer(device="d", center=None, losses={}, n=1, why=(EVIL,)), as_json=False)
    told = capsys.readouterr()
    assert is_harmless(told.err, lines=6)
    assert is_harmless(told.out, lines=3)
    assert is_harmless(said.getvalue(), lines=2)
    assert is_harmless(CheckResult(name="broker", ok=False, said=EVIL, hint=EVIL).line(), lines=1)
    nearest_cli._print(NearestAnswer(device="d", center=None, losses={}, n=1, why=(EVIL,)), as_json=True)
    assert json.loads(capsys.readouterr().out)["why"] == [EVIL]  # escaped by JSON itself


@pytest.mark.parametrize("room", ["coordinator", "export", "emulator"])
def test_warnings_of_a_server_command_are_printed_without_escapes(room: str) -> None:
    program = (
        f"import logging\nfrom {room}.cli import app\n"
        "@app.command()\ndef warn() -> None:\n"
        f"    logging.getLogger('coordinator.runtime').warning('%s cannot take part', {EVIL!r})\n"
        "app(['warn'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert is_harmless(done.stderr, lines=2)


def test_visible_text_stays_as_it_is() -> None:
    for text in ("Größe 3 µm, 数字, ±", "a\nb\tc"):
        assert printable(text) == text
    assert printable_line("a\nb\tc\ud800") == "a\\nb\\tc\\ud800"
    assert printable(EVIL.encode().decode()).startswith("\\x1b]0;owned\\x07 \\x1b[31mred\\r\\x9b2K \\u202etxt\nerror")
