"""What a device tells its owner: events of its life, and each as one line of text.

An event is a mapping with `event` and what belongs to it; `round` and `of` count rounds, `bytes` is the size of what is
sent, `loss` the mean training loss, `seconds` the time of the computation.

    connected {broker}             lost {reason}              coordinator {online}
    waiting   {doing, newcomers, here, needed, name, round, of, live}: what the federation does
              (PROTOCOL.md, `coord`); `live` is false for what the broker had before this device came
    task      {run, round, of, job, n}                        result {round, of, job, loss, seconds, bytes, what}
    answered  {round, of, status, detail}                     refused {round, of, code, detail}
    dropped   {round, of}                                     stopping {}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edge_client.printable import printable_line, size_in_words

Event = Mapping[str, Any]
Tell = Callable[[Event], None]

TAKEN = ("ok", "dup")  # answers that say that the coordinator has stored an update
SENT = {"delta": "weight differences", "stats": "statistics"}
REFUSAL_HINTS = {"bad_signature": "; if the federation changed its key, this device needs the new `signing-keys` line"}
TAKES_PART = {
    "now": "",
    "next-round": "; a new device takes part from the next round",
    "next-run": "; a new device takes part from the next run",
    "no": "",
}
GET_CENTER = (  # `nearest` needs the state folder that this client holds
    "to get the center that fits as a file, stop this client and give the same --config to `fedcenters-edge nearest`, "
    "which prints where the file is"
)


def format_device_event(event: Event) -> str:
    """One line; "" for what only a program wants to know."""
    return printable_line(WORDS[event["event"]](event))


def _round(event: Event) -> str:
    number, of = event.get("round", 0), event.get("of")
    if of is not None and number > of:
        return "after the last round"
    return f"round {number}" if of is None else f"round {number} of {of}"


def _waiting(event: Event) -> str:
    rest = TAKES_PART[event["newcomers"]]
    doing = {
        "compile": "waiting: the coordinator compiles the training program",
        "gather": f"waiting: {event.get('here')} of {event.get('needed')} devices",
        "train": f"waiting: {event.get('name')} is in {_round(event)}{rest}",
        "export": "done: training is over, and the coordinator writes the centers",
        "serve": f"done: training is over; {GET_CENTER}",
    }
    return doing[event["doing"]]


def _result(event: Event) -> str:
    if event["what"] == "masked":  # keys and shares are computed in no time, and concern only programs
        sends = f"sends {size_in_words(event['bytes'])} to a sum of many devices"
        return f"{_round(event)}: computed for {event['seconds']:.1f} s; {sends}" if event["seconds"] else ""
    sends = f"sends {size_in_words(event['bytes'])} of {SENT[event['what']]}"
    if event["job"] == "fit":
        return f"{_round(event)}: loss {event['loss']:.3f} after {event['seconds']:.1f} s; {sends}"
    return f"{_round(event)}: measured models on its samples in {event['seconds']:.1f} s; {sends}"


def _answered(event: Event) -> str:
    which = _round(event)
    if event["status"] in TAKEN:
        return f"{which}: accepted" if event["job"] == "fit" else ""
    if event["status"] == "retry":
        return f"{which}: the coordinator could not store it and asks again later"
    return f"{which}: not counted: {event['detail'] or event['status']}"


WORDS: Mapping[str, Callable[[Event], str]] = {
    "connected": lambda e: f"connected to {e['broker']}",
    "lost": lambda e: f"connection lost ({e['reason']}); connecting again",
    "coordinator": lambda e: "" if e["online"] else "the coordinator is away; waiting for it",
    "waiting": _waiting,
    "task": lambda e: f"{_round(e)}: trains on {e['n']} samples" if e["job"] == "fit" else "",
    "result": _result,
    "answered": _answered,
    "refused": lambda e: f"{_round(e)}: refused: {e['detail'] or e['code']}{REFUSAL_HINTS.get(e['code'], '')}",
    "dropped": lambda e: f"{_round(e)}: the coordinator does not need it any more",
    "stopping": lambda _: "stopping",
}
