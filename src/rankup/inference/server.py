"""Running the application with uvicorn until a signal ends it."""

import asyncio
import errno
import ipaddress
import json
import signal
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rankup.errors import RankupError

_GRACE = 30  # seconds for requests in flight when the server ends
_KEEP = 30  # seconds that a connection stays open without a request
_LINGER = 2  # seconds for which a refused client may go on sending
_MOST_IGNORED = 16 << 20  # bytes that it may send in this time


def run(app: FastAPI, host: str, port: int, patience: float, started: Any = None) -> None:
    """Serve until SIGTERM or Ctrl-C, then answer the requests in flight and return.

    Args:
        app: the application.
        host: the address to listen on.
        port: to listen on; 0 for any that is free.
        patience: seconds in which a request's headers must have come.
        started: called with the URL once connections are accepted.
    """
    _refuse_taken(host, port)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=_impatient(patience),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP,
        timeout_graceful_shutdown=_GRACE,
        h11_max_incomplete_event_size=32 << 10,
    )
    server = _Server(config, started)

    # uvicorn raises a signal that ended it again; this handler keeps it from killing the process.
    def end(*_: object) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _refuse_taken(host: str, port: int) -> None:
    """Raise a sentence for an address that cannot be listened on, where uvicorn only logs an
    error."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise RankupError(f"{host} is no address of this machine: {error.strerror}") from None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as asyncio does
            try:
                tried.bind(address)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):  # uvicorn may find a way
                    continue
                raise RankupError(
                    f"port {port} of {host} cannot be used ({error.strerror}): name another with "
                    "--port, or 0 for any that is free"
                ) from None


def is_loopback(host: str) -> bool:
    """Whether a host can only be reached from this machine.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: Any) -> None:
        super().__init__(config)
        self._tell = started

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started and self._tell is not None:
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            self._tell(f"http://{host}:{self.servers[0].sockets[0].getsockname()[1]}")


def _impatient(seconds: float) -> type[asyncio.Protocol]:
    """Make a subclass of uvicorn's protocol that closes connections whose headers do not come in
    time, and answers requests that are not HTTP in JSON, as the application does."""

    class Impatient(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
        _timer: asyncio.TimerHandle | None = None
        _ignored: int | None = None  # bytes since it was refused

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect_headers()

        def data_received(self, data: bytes) -> None:
            if self._ignored is not None:
                self._ignored += len(data)
                if self._ignored > _MOST_IGNORED:
                    self.transport.close()
                return
            if self._timer is None and self._is_idle():
                self._expect_headers()
            super().data_received(data)
            if self._timer is not None and not self._is_idle():
                self._timer.cancel()
                self._timer = None

        def connection_lost(self, exc: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            self._refuse("400 Bad Request", "the request is not HTTP, or its headers are too long")

        def _is_idle(self) -> bool:
            """Whether no request is being answered."""
            return self.cycle is None or self.cycle.response_complete

        def _expect_headers(self) -> None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._give_up)

        def _give_up(self) -> None:
            self._refuse("408 Request Timeout", f"no request came within {seconds:g} s")

        def _refuse(self, status: str, sentence: str) -> None:
            if self.transport.is_closing() or self._ignored is not None:
                return
            body = json.dumps({"error": sentence}).encode()
            self.transport.write(
                f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: "
                f"{len(body)}\r\nconnection: close\r\n\r\n".encode()
                + body
            )
            if not self._is_idle():
                self.transport.close()
                return
            # Closing at once would reset the connection of a client that is still sending, and the
            # answer would be lost.
            self._ignored = 0
            self.transport.write_eof()
            self._timer = asyncio.get_running_loop().call_later(_LINGER, self.transport.close)

    return Impatient
