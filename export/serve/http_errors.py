"""What every HTTP service of ours says when something is wrong: one JSON object, {"error": words}."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edge_client.errors import Malformed


def error_response(status: int, words: str, headers: Mapping[str, str] | None = None) -> Response:
    """An answer of this status."""
    return JSONResponse({"error": words}, status_code=status, headers=headers)


async def on_http_exception(_: Request, wrong: Exception) -> Response:
    """The handler of HTTPException."""
    if not isinstance(wrong, HTTPException):
        raise wrong
    return error_response(wrong.status_code, wrong.detail, dict(wrong.headers or {}))


async def on_malformed(_: Request, wrong: Exception) -> Response:
    """The handler of Malformed."""
    if not isinstance(wrong, Malformed):
        raise wrong
    return error_response(413 if wrong.code == "too_big" else 400, wrong.message)
