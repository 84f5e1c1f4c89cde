"""Networks to serve, and servers of them in a process or in a test's own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rankup
from helpers.command import ENV
from helpers.pictures import encoded, pictures
from rankup.data.inputs import ImageInput
from rankup.net.network import IncrementalNet

SIDE = 4
GREY = ImageInput(SIDE, channels=1)


def network(*classes: int, inputs: int = SIDE * SIDE, seed: int = 0) -> IncrementalNet:
    """A network whose tasks, called "task 1" and so on, answer differently."""
    net = rankup.grow(rankup.models.mlp(inputs, hidden=[12, 8]), rankup.Rank(3, 1), seed=seed)
    for count in classes:
        add_task(net, count)
    return net.eval()


def add_task(net: IncrementalNet, classes: int = 2, name: str | None = None) -> None:
    number = len(net.tasks) + 1
    net.begin_task(name or f"task {number}", classes, selectors=0.5)
    draw = torch.Generator().manual_seed(number)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5, generator=draw)
    net.commit_task()


def guessing(folder: Path) -> Path:
    """A network that guesses, with tasks of two and three classes."""
    module = rankup.models.mlp(SIDE * SIDE, hidden=[12, 8])
    net = rankup.grow(module, rankup.Rank(3, 1), router="energy, means")
    for number, classes in enumerate((2, 3)):
        net.begin_task(f"task {number + 1}", classes)
        draw = torch.Generator().manual_seed(number)
        net.commit_task(calibrate=[number + torch.rand(40, SIDE * SIDE, generator=draw)])
    net.inputs = GREY
    rankup.save(net, folder)
    return folder


def image(seed: int = 0, side: int = SIDE) -> bytes:
    return encoded(pictures(1, side, side, seed=seed)[0])


class Server:
    """`rankup serve` in a process of its own."""

    def __init__(self, folder: Path, *options: object, **env: str) -> None:
        command = [sys.executable, "-m", "rankup", "serve", str(folder), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *map(str, options)], env={**ENV, **env}, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url = line.partition(" at ")[2].partition(" ")[0]
        self.port = int(self.url.rpartition(":")[2] or 0)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


@contextlib.contextmanager
def serving(folder: Path, *options: object, **env: str) -> Iterator[Server]:
    server = Server(folder, *options, **env)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        server.process.stdout.close()  # type: ignore[union-attr]


def raw(port: int, *parts: bytes, wait: float = 10) -> bytes:
    """What a server answers to bytes that may be anything, until it closes the connection or has
    said nothing for a while."""
    with socket.create_connection(("127.0.0.1", port), wait) as connection:
        for part in parts:
            connection.sendall(part)
        received = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            while block := connection.recv(1 << 16):
                received += block
        return received


def error_of(answer: bytes) -> tuple[int, str]:
    """The status and the sentence of an answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    data: Any = json.loads(body)
    return int(head.split()[1]), data["error"]
