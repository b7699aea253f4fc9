"""What is answered to a request that cannot be served: OpenAI's form of an error, with the house's text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is answered with an error.

    Attributes:
      status: of HTTP.
      message: names the thing, its value, the need and the remedy.
      param: the field of the body that is meant.
      code: a word that programs can tell it by.
      headers: to send beside it.
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

    def body(self) -> dict[str, Any]:
        """What is sent as JSON."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": _valid(self.message), "type": kind, "param": _valid(self.param), "code": self.code}}


def _valid(text: str | None) -> str | None:
    """The text as UTF-8 can hold it: names of fields come from clients, and may have halves of surrogate pairs."""
    return text and text.encode(errors="backslashreplace").decode()


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request itself cannot be served."""
    return ApiError(400, message, param=param, code=code)
