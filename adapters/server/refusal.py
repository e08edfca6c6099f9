"""Saying no, as OpenAI's API does: a status and `{"error": {...}}`."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
}


class Refusal(Exception):
    """A request that is not served. `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status

    def body(self) -> dict[str, Any]:
        """The JSON that says so."""
        return error_body(self.message, self.status, self.param)

    def response(self) -> Response:
        """The whole response. Where the body may not have been read, nothing can follow it."""
        headers = {"connection": "close"} if self.status == 413 else None  # noqa: PLR2004 - a status
        return json_response(self.body(), self.status, headers)


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """An error of OpenAI's API, nested, as vLLM writes it."""
    kind = _TYPES.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """JSON, as compact as engines write it."""
    return Response(orjson.dumps(content), status, headers, "application/json")
