"""Access control: the host header, the origin, the API key, and the number of connections."""

from __future__ import annotations

import hmac
import ipaddress
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from llama_jax.errors import short_repr
from llama_jax.serving.http.errors import ApiError

OPEN_PATHS = ("/", "/health", "/ready")  # without a key: the page, which asks the user for the key, and probes
CLIENT_LEFT = 499  # as in nginx
BLANKS = " \t"  # white space of HTTP; plain str.strip would also remove latin-1 bytes that may end a key


@dataclass(frozen=True, kw_only=True)
class Access:
    """Which requests are allowed.

    Attributes:
      api_key: bearer token that requests must have; None for no key.
      hosts: allowed host names of the server, in addition to localhost and IP addresses; "*" for any.
      origins: other origins whose pages may send requests, such as https://example.org; "*" for any.
      most_connections: maximum number of concurrent connections; 0 for no limit.
      open_metrics: whether `/metrics` needs no key.
    """

    api_key: str | None = None
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    most_connections: int = 0
    open_metrics: bool = False


class Guard:
    """ASGI middleware that rejects requests that `Access` does not allow, and counts responses.

    In DNS rebinding, a page of a site that resolves to this machine sends the site's name as the host, never an IP address:
    so addresses are allowed, and names only if known.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        *,
        paths: Sequence[str],
        answered: Counter[tuple[str, int]],
        connections: Callable[[], int],
    ) -> None:
        self._app = app
        self._access = access
        self._key = None if access.api_key is None else access.api_key.encode()
        self._paths = frozenset(paths)
        self._without_key = (*OPEN_PATHS, "/metrics") if access.open_metrics else OPEN_PATHS
        self._answered = answered
        self._connections = connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        cors: list[tuple[bytes, bytes]] = []  # without credentials, because no cookies are used
        if origin is not None and self._is_shared(origin):
            readers = b"*" if "*" in self._access.origins else origin.encode("latin-1")
            cors = [(b"access-control-allow-origin", readers), (b"vary", b"Origin")]

        async def send_counted(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), *cors]
            await send(message)

        try:
            await self._responder(scope, headers, origin)(scope, receive, send_counted)
        except Exception:
            status = status or 500  # this response is sent outside this middleware, see `make_app`
            raise
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._answered[path, status or CLIENT_LEFT] += 1

    def _responder(self, scope: Scope, headers: Headers, origin: str | None) -> ASGIApp:
        """The application, or an error response to send instead."""
        try:
            self._check(scope, headers, origin)
            if scope["method"] == "OPTIONS" and origin is not None and "access-control-request-method" in headers:
                allowed = {"Methods": "GET, POST", "Headers": "Authorization, Content-Type"}
                fields = {f"Access-Control-Allow-{name}": value for name, value in allowed.items()}
                return Response(status_code=204, headers=fields)
            if self._key is not None and scope["path"] not in self._without_key:
                self._check_key(self._key, headers.get("authorization", ""))
        except ApiError as error:
            return error.response()
        return self._app

    def _check_key(self, api_key: bytes, authorization: str) -> None:
        scheme, _, key = authorization.partition(" ")
        # In constant time, so that timing does not reveal how much of a guess is right.
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip(BLANKS).encode("latin-1"), api_key):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check(self, scope: Scope, headers: Headers, origin: str | None) -> None:
        """Raise ApiError if the host, the origin or the number of connections is not allowed."""
        most = self._access.most_connections
        if most and self._connections() > most and scope["path"] not in OPEN_PATHS:
            raise ApiError(
                429,
                f"there are {most} connections, which is the limit; try again later",
                code="too_many_connections",
                headers={"Retry-After": "1", "Connection": "close"},
            )
        if len(hosts := headers.getlist("host")) > 1:  # a proxy might use the other one
            raise ApiError(400, f"the request has {len(hosts)} Host headers; send one")
        host = headers.get("host", "")
        if "*" not in self._access.hosts and not self._is_known(host):
            raise ApiError(
                403,
                f"the host {short_repr(host, 80)} is not allowed; the server's --allow-host adds one",
                code="unknown_host",
            )
        if origin is not None and not self._is_shared(origin) and origin.partition("://")[2] != host:
            raise ApiError(
                403,
                f"the origin {short_repr(origin, 80)} is not allowed; the server's --allow-origin adds one",
                code="unknown_origin",
            )

    def _is_known(self, host: str) -> bool:
        try:
            name = urlsplit("//" + host).hostname or ""
        except ValueError:
            return False
        if name == "localhost" or name in self._access.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_shared(self, origin: str) -> bool:
        return "*" in self._access.origins or origin in self._access.origins
