"""Clients that keep a server busy, for `serving.py`: run as a process of its own, so that they take
nothing of the server's core. Prints JSON."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

Report = dict[str, object]


class Client(asyncio.Protocol):
    """One connection that sends a prepared request, reads the answer, and tells how it went."""

    def __init__(self) -> None:
        self.buffer, self.answer = b"", None

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) >= length:
            self.buffer = b""
            self._end(int(head[9:12]))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(0)

    def _end(self, status: int) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(status)

    async def ask(self, request: bytes) -> int:
        """The answer's status; 0 if the connection was lost."""
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self.answer


def requests(path: str, bodies: list[str]) -> list[bytes]:
    """As the bytes that are sent: a GET without bodies."""
    host = "Host: localhost\r\n"
    if not bodies:
        return [f"GET {path} HTTP/1.1\r\n{host}\r\n".encode()]
    return [
        f"POST {path} HTTP/1.1\r\n{host}Content-Type: application/json\r\nContent-Length: "
        f"{len(body)}\r\n\r\n{body}".encode()
        for body in bodies
    ]


async def connected(port: int) -> Client:
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return client


async def busy(port: int, clients: int, seconds: float, sent: Iterator[bytes]) -> Report:
    """Each client asks again as soon as it is answered."""
    statuses: dict[int, int] = {}
    latencies: list[float] = []
    until = time.perf_counter() + seconds

    async def work(client: Client) -> None:
        while (began := time.perf_counter()) < until:
            status = await client.ask(next(sent))
            latencies.append(time.perf_counter() - began)
            statuses[status] = statuses.get(status, 0) + 1
            if not status:
                return

    all_clients = [await connected(port) for _ in range(clients)]
    began = time.perf_counter()
    await asyncio.gather(*map(work, all_clients))
    return report(statuses, latencies, time.perf_counter() - began)


async def steady(
    port: int, rate: float, seconds: float, sent: Iterator[bytes]
) -> dict[str, object]:
    """Requests at a fixed rate, whether or not earlier ones were answered; a latency counts from
    when the request was due."""
    statuses: dict[int, int] = {}
    latencies: list[float] = []
    spare: list[Client] = [await connected(port) for _ in range(64)]

    async def one(due: float, request: bytes) -> None:
        client = spare.pop() if spare else await connected(port)
        status = await client.ask(request)
        latencies.append(time.perf_counter() - due)
        statuses[status] = statuses.get(status, 0) + 1
        spare.append(client)

    began, tasks = time.perf_counter(), []
    for number in range(int(rate * seconds)):
        due = began + number / rate
        if (left := due - time.perf_counter()) > 0:
            await asyncio.sleep(left)
        tasks.append(asyncio.create_task(one(due, next(sent))))
    await asyncio.gather(*tasks)
    return report(statuses, latencies, time.perf_counter() - began)


def report(statuses: dict[int, int], latencies: list[float], seconds: float) -> Report:
    ordered = sorted(latencies)

    def at(share: float) -> float:
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {
        "per_second": sum(statuses.values()) / seconds,
        "statuses": statuses,
        "p50_ms": at(0.5),
        "p99_ms": at(0.99),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("path")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rate", type=float, help="at a fixed rate")
    parser.add_argument("--bodies", help="a file with JSON bodies, one on each line")
    options = parser.parse_args()
    bodies = Path(options.bodies).read_text().splitlines() if options.bodies else []
    sent = cycle(requests(options.path, bodies))
    if options.rate:
        measured = asyncio.run(steady(options.port, options.rate, options.seconds, sent))
    else:
        measured = asyncio.run(busy(options.port, options.clients, options.seconds, sent))
    json.dump(measured, sys.stdout)


if __name__ == "__main__":
    main()
