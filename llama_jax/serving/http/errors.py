"""Errors of requests, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error response to a request.

    Attributes:
      status: the HTTP status.
      message: names the input, its value, what is needed and the remedy.
      param: the invalid field of the body.
      code: identifies the error for programs.
      headers: headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        error_type = ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {
            "error": {"message": _valid(self.message), "type": error_type, "param": _valid(self.param), "code": self.code}
        }


class DisconnectedError(ApiError):
    """The client has disconnected, and reads no response."""

    def __init__(self) -> None:
        super().__init__(400, "the client disconnected before its request was answered")


def _valid(text: str | None) -> str | None:
    """The text as valid Unicode, because field names come from clients and may contain lone surrogates."""
    return text and text.encode(errors="backslashreplace").decode()


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request itself is invalid or not supported."""
    return ApiError(400, message, param=param, code=code)


def shutting_down() -> ApiError:
    """A 503: the server accepts no more requests."""
    headers = {"Retry-After": "5", "Connection": "close"}
    return ApiError(503, "the server is shutting down; try another server", code="draining", headers=headers)
