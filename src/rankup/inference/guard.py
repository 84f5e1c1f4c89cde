"""Middleware before the application: it checks hosts, origins, tokens, and the size and speed of
requests, and adds security headers to every answer."""

import asyncio
import hmac
import math
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse

from rankup.inference.limits import Limits, Refused
from rankup.inference.metrics import Metrics

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Nothing is loaded from elsewhere, and no other page may show this one or submit to it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]", "testserver"})
_OPEN = frozenset({"/", "/page.css", "/page.js", "/icon.svg", "/health"})  # need no token
_ZIPS = "/learn"


class Guard:
    """ASGI middleware that refuses requests and counts them.

    Args:
        app: the application that gets the other requests.
        limits: on the sizes of bodies and on the time that they may take.
        metrics: that requests are counted in.
        paths: that metrics distinguish; all others are counted as one.
        token: that requests must have; None if they need none.
        hosts: host names that requests may have; None for any. Without this check, a page of
            another site could make a browser on this machine send requests to a server that only
            listens locally.
    """

    def __init__(
        self,
        app: App,
        limits: Limits,
        metrics: Metrics,
        paths: frozenset[str],
        token: str | None = None,
        hosts: frozenset[str] | None = _LOCAL,
    ) -> None:
        self.app, self.limits, self.metrics, self.paths = app, limits, metrics, paths
        self.token = None if token is None else f"Bearer {token}".encode()
        self.hosts = hosts
        self.buffered = 0  # bytes of bodies that are being read or answered
        self._reading: set[_Exchange] = set()  # exchanges that wait for more of their bodies
        self._has_timer = False  # whether `_interrupt_late` is scheduled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        exchange = _Exchange(self, scope, receive, send)
        try:
            try:
                self._check(scope, exchange)
            except Refused as refusal:
                headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
                answer = JSONResponse({"error": str(refusal)}, refusal.status, headers)
                await answer(scope, exchange.receive, exchange.send)
            else:
                await self.app(scope, exchange.receive, exchange.send)
        finally:
            self.buffered -= exchange.received
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.request(path, exchange.status, time.perf_counter() - began)

    def watch(self, exchange: "_Exchange") -> set["_Exchange"]:
        """Interrupt an exchange once it is late, unless it is removed from the returned set before.
        All exchanges share one timer, since setting one takes longer than reading most bodies."""
        self._reading.add(exchange)
        if not self._has_timer:
            self._has_timer = True
            asyncio.get_running_loop().call_later(self.limits.patience / 8, self._interrupt_late)
        return self._reading

    def _interrupt_late(self) -> None:
        now, self._has_timer = time.monotonic(), bool(self._reading)
        for exchange in self._reading:
            if exchange.task is not None and now > exchange.until and not exchange.is_late:
                exchange.is_late = True
                exchange.task.cancel()
        if self._has_timer:
            asyncio.get_running_loop().call_later(self.limits.patience / 8, self._interrupt_late)

    def _check(self, scope: Scope, exchange: "_Exchange") -> None:
        headers = exchange.headers
        host = headers.get(b"host", b"").decode("latin-1")
        if self.hosts is not None and _name(host) not in self.hosts:
            raise Refused(403, f"this server is not called {host[:80]!r}")
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").partition("://")[2] != host:
            raise Refused(403, "pages of other sites may not ask this server")
        if self.token is not None and scope["path"] not in _OPEN:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self.token):
                raise Refused(401, "a token is needed, as the header Authorization: Bearer TOKEN")
        if exchange.length > exchange.most:
            raise exchange.too_long()


class _Exchange:
    """One request and its answer: counts and times the body, and adds headers to the answer."""

    def __init__(self, guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        self._guard, self._receive, self._send = guard, receive, send
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.status = 499  # nginx's status for clients that disconnect before the answer
        self.received = 0
        limits = guard.limits
        self.most = limits.zip if scope["path"] == _ZIPS else limits.body
        length = self.headers.get(b"content-length", b"0")
        self.length = int(length) if length.isdigit() else 0
        self._ended = self.length == 0 and b"transfer-encoding" not in self.headers
        # A larger one gets more time, at 100 kB a second.
        self._seconds = limits.patience + min(self.length, self.most) / 1e5
        self.task: asyncio.Task[Any] | None = None  # reads the body
        self.until = math.inf  # when all of the body must have come
        self.is_late = False

    async def receive(self) -> Message:
        if self._ended:
            return await self._receive()
        message = await self._in_time()
        self.received += (size := len(message.get("body", b"")))
        self._guard.buffered += size
        if self.received > self.most:
            raise self.too_long()
        if self._guard.buffered > self._guard.limits.bodies:
            raise Refused(503, "the server is reading too much at once: ask again later")
        return message

    async def _in_time(self) -> Message:
        if self.task is None:
            self.task = asyncio.current_task()
            self.until = time.monotonic() + self._seconds
        watched = self._guard.watch(self)
        try:
            message = await self._receive()
        except asyncio.CancelledError:
            if not self.is_late or self.task is None:
                raise
            self.task.uncancel()
            self._ended = True  # the rest of the body is not read
            raise Refused(408, f"the body did not come within {self._seconds:.0f} s") from None
        finally:
            watched.discard(self)
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._ended = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if not self._ended:
                await self._drain()
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *_HEADERS]
        await self._send(message)

    async def _drain(self) -> None:
        """Read the rest of a refused body, within limits, because many clients read the answer only
        after they have sent all of it."""
        if b"expect" in self.headers or self.length > 4 * self.most:
            return
        left = 4 * self.most
        try:
            while not self._ended and left > 0:
                left -= len((await self._in_time()).get("body", b""))
        except Refused:
            pass

    def too_long(self) -> Refused:
        return Refused(413, f"the body is larger than {self.most:,} bytes, which is the most")


def _name(host: str) -> str:
    """A host without its port.

    >>> _name("localhost:8000"), _name("[::1]:8000")
    ('localhost', '[::1]')
    """
    return host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
