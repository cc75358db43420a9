"""The OpenAPI 3.1 document of the HTTP interface, as data. A test draws requests from it and checks the answers.

It is written by hand: Starlette derives no types, and its SchemaGenerator only joins YAML from handlers' docstrings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge_client.protocol.nearest.router import FITS
from edge_client.protocol.nearest.sketch import MAX_SKETCH_SIZE

HASH = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
DEVICE = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
CENTER = {"type": "integer", "minimum": 0, "maximum": 1023}
MAYBE_CENTER = {"type": ["integer", "null"], "minimum": 0, "maximum": 1023}
DISTANCE = {"type": "number"}  # below zero only a loss of the user's own
Headers = Mapping[str, str]  # of an answer: name -> what it says
CACHED = {"ETag": "for If-None-Match", "Cache-Control": "how long it may be kept"}
RANGE = {"Content-Range": "which bytes of how many"}
LATER = {"Retry-After": "after how many seconds to ask again"}
ASKER = {
    "name": "device",
    "in": "query",
    "required": False,
    "schema": DEVICE,
    "description": "who asks; some devices get a new bundle before the others",
}


def openapi_document() -> dict[str, Any]:
    """The whole document, a new one each time."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "fedcenters",
            "version": "1",
            "description": "The centers of a federation, and which one suits a device.",
        },
        "paths": {
            "/health": {"get": _get_health()},
            "/openapi.json": {"get": _operation("This document.", _json({}))},
            "/index.json": {"get": _get_index()},
            "/centers": {"get": _get_centers()},
            "/centers/{center}/{file}": {"get": _get_center_file()},
            "/generations/{generation}/{path}": {"get": _get_file()},
            "/rollout": {"get": _get_rollout()},
            "/nearest": {"post": _post_nearest()},
            "/reports": {"post": _post_report()},
        },
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _get_health() -> dict[str, Any]:
    operation = _operation("Whether the server answers; no token is needed.", _json({"ok": {"type": "boolean"}}))
    del operation["responses"]["401"]
    return {**operation, "security": []}


def _get_index() -> dict[str, Any]:
    content = {"v": {"const": 1}, "generation": HASH, "manifest": {"type": "string"}}
    return _operation("The bundle that is served now.", _json(content), [ASKER], cached=True)


def _get_centers() -> dict[str, Any]:
    center = _object({"center": CENTER, "card": {"type": "object"}, "files": {"type": "object"}})
    content = {"generation": HASH, "model": {"type": "string"}, "centers": {"type": "array", "items": center}}
    return _operation("Every center: its card and its files.", _json(content), [ASKER], cached=True)


def _get_center_file() -> dict[str, Any]:
    where = [
        {"name": "center", "in": "path", "required": True, "schema": CENTER},
        {
            "name": "file",
            "in": "path",
            "required": True,
            "schema": {"type": "string", "pattern": "^[a-z0-9-]+$"},
            "description": "a format or variant, like onnx or tflite-int8; /centers lists them",
        },
    ]
    operation = _operation("To the file of a center.", {}, [*where, ASKER])
    there = _with_headers({"description": "where it is"}, {"Location": "the address of the file"})
    operation["responses"] |= {"307": there, "404": _error("no such center or file")}
    del operation["responses"]["200"]
    return operation


def _get_file() -> dict[str, Any]:
    where = [
        {"name": "generation", "in": "path", "required": True, "schema": HASH},
        {"name": "path", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[A-Za-z0-9._/-]+$"}},
    ]
    operation = _operation("A file of a bundle; it never changes, but for manifest.sig.", {}, where, cached=True)
    content: dict[str, Any] = {"*/*": {"schema": {}}}
    operation["responses"] |= {
        "200": _with_headers({"description": "the whole file", "content": content}, CACHED),
        "206": _with_headers({"description": "the ranges that were asked for", "content": content}, CACHED),
        "400": _error("the Range header names no bytes"),
        "404": _error("no such generation or file"),
        "416": _error("no such range", RANGE),
    }
    return operation


def _get_rollout() -> dict[str, Any]:
    maybe = {"type": ["string", "null"]}
    evidence = _object({"pairs": {"type": "integer"}, "needed": {"type": "integer"}, "e_value": {"type": "number"}})
    content = {
        "stable": maybe,
        "candidate": maybe,
        "withdrawn": {"type": "array", "items": HASH},
        "share": {"type": "number"},
        "evidence": evidence,
    }
    return _operation("How far a new bundle is.", _json(content))


def _post_nearest() -> dict[str, Any]:
    def question(how: str, name: str, item: dict[str, Any], max_items: int) -> dict[str, Any]:
        values = {"type": "array", "items": item, "minItems": 1, "maxItems": max_items}
        samples = {"type": "integer", "minimum": 1, "maximum": 2**31}
        return _object({"how": {"const": how}, name: values}, {"device": DEVICE, "n": samples})

    body = {
        "oneOf": [
            question("loss", "losses", {"type": "number"}, 1024),
            question("votes", "votes", {"type": "integer", "minimum": 0}, 1024),
            question("sketch", "sketch", {"type": "number"}, MAX_SKETCH_SIZE),
            question("round", "sketch", {"type": "number"}, MAX_SKETCH_SIZE),
        ]
    }
    other = _object({"center": CENTER, "distance": DISTANCE})
    content = {
        "generation": HASH,
        "center": MAYBE_CENTER,
        "distance": DISTANCE,
        "alternatives": {"type": "array", "items": other, "maxItems": 8},
    }
    summary = (
        "Which center suits a device: by its mean loss on each, by votes of its samples, by a sketch of its inputs or "
        "of a local round. null: none. `n` samples were looked at; `fit` says how it fits where that was learned."
    )
    return _posted(summary, body, content, {"fit": {"enum": list(FITS)}})


def _post_report() -> dict[str, Any]:
    accuracy = {"type": "number", "minimum": 0, "maximum": 1}
    body = _object({"device": DEVICE, "generation": HASH, "accuracy": accuracy})
    content = {"counted": {"type": "boolean"}, "candidate": {"type": ["string", "null"]}}
    summary = "How a bundle does on a device: the share of its samples that its center gets right."
    operation = _posted(summary, body, content)
    operation["responses"]["503"] = _error("it cannot be stored now, and does not count", LATER)
    return operation


def _operation(
    summary: str, ok: dict[str, Any], parameters: list[dict[str, Any]] | None = None, *, cached: bool = False
) -> dict[str, Any]:
    responses: dict[str, Any] = {
        "200": ok,
        "401": _error("no token", {"WWW-Authenticate": "Bearer"}),
        "421": _error("a foreign host name"),
        "429": _error("too many requests", LATER),
    }
    if parameters:
        responses["400"] = _error("a parameter is wrong")
    if cached:
        responses["200"] = _with_headers(ok, CACHED)
        responses["304"] = _with_headers({"description": "as it was"}, CACHED)
    return {"summary": summary, "parameters": parameters or [], "responses": responses, "security": [{}, {"token": []}]}


def _posted(
    summary: str, body: dict[str, Any], content: dict[str, Any], also: dict[str, Any] | None = None
) -> dict[str, Any]:
    operation = _operation(summary, _json(content, also))
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    operation["responses"] |= {
        "400": _error("it cannot be answered"),
        "403": _error("a page of another site, or reports without a token"),
        "408": _error("too slow"),
        "413": _error("the body is too big"),
        "415": _error("not application/json"),
    }
    return operation


def _object(needed: dict[str, Any], also: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "object", "properties": {**needed, **(also or {})}, "required": sorted(needed)}


def _json(properties: dict[str, Any], also: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"description": "the answer", "content": {"application/json": {"schema": _object(properties, also)}}}


def _error(description: str, headers: Headers | None = None) -> dict[str, Any]:
    schema = _object({"error": {"type": "string"}})
    return _with_headers({"description": description, "content": {"application/json": {"schema": schema}}}, headers)


def _with_headers(answer: dict[str, Any], headers: Headers | None) -> dict[str, Any]:
    """The answer, which always has these headers."""
    told = {
        name: {"description": words, "required": True, "schema": {"type": "string"}}
        for name, words in (headers or {}).items()
    }
    return {**answer, "headers": told} if told else answer
