"""The command `rankup serve` as a process: how it starts, ends, and meets strange senders."""

import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rankup
from helpers.serving import SIDE, Server, add_task, error_of, network, raw, serving

BODY = json.dumps({"task": "task 1", "tensor": [0.5] * SIDE * SIDE}).encode()
HEAD = (
    b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Authorization: Bearer secret\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "net"
    rankup.save(network(3, 2), folder)
    return folder


def ask(url: str, task: str = "task 1") -> Any:
    body = json.dumps({"task": task, "tensor": [0.5] * SIDE * SIDE}).encode()
    request = urllib.request.Request(f"{url}/predict", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)["answers"]


def test_requests_in_flight_are_answered_when_it_ends(folder: Path) -> None:
    with serving(folder, "--wait", 700) as server:
        answers: list[bytes] = []
        threads = [
            threading.Thread(target=lambda: answers.append(raw(server.port, HEAD, BODY)))
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.3)  # they wait for a batch
        assert server.end() == 0
        for thread in threads:
            thread.join()
        assert [answer.split()[1] for answer in answers] == [b"200"] * 5
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", server.port), 1)


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[Server]:
    """A server for other machines, of little patience."""
    options = ("--host", "0.0.0.0", "--patience", 1, "--body", 0.1)
    with serving(folder, *options, RANKUP_TOKEN="secret") as server:
        yield server
        assert server.end() == 0


def test_token_comes_from_the_environment(guarded: Server) -> None:
    without = HEAD.replace(b"Authorization: Bearer secret\r\n", b"")
    assert error_of(raw(guarded.port, without, BODY))[0] == 401
    assert raw(guarded.port, HEAD, BODY).startswith(b"HTTP/1.1 200")


def test_what_is_not_http_is_told_so(guarded: Server) -> None:
    sentence = "the request is not HTTP, or its headers are too long"
    assert error_of(raw(guarded.port, b"nonsense\r\n\r\n")) == (400, sentence)
    endless = b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: %s\r\n" % (b"x" * 5_000_000)
    for _ in range(5):  # it is all sent before the answer is read
        assert error_of(raw(guarded.port, endless)) == (400, sentence)


@pytest.mark.parametrize(
    "parts", [(), (b"GET / HT",), (HEAD, BODY[:10])], ids=["nothing", "headers", "body"]
)
def test_slow_senders_are_told_so(guarded: Server, parts: tuple[bytes, ...]) -> None:
    began = time.monotonic()
    status, sentence = error_of(raw(guarded.port, *parts))
    assert 0.9 < time.monotonic() - began < 8
    assert status == 408
    assert "within 1 s" in sentence


def test_next_request_of_a_connection_has_no_more_time(guarded: Server) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port), 10) as connection:
        connection.sendall(HEAD.replace(b"Connection: close\r\n", b"") + BODY)
        first = b""
        while not first.endswith(b"]}]}"):
            first += connection.recv(1 << 16)
        assert first.startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET / HT")
        assert error_of(connection.recv(1 << 16))[0] == 408
        assert connection.recv(1 << 16) == b""


def test_refusal_reaches_who_sends_all_before_reading(guarded: Server) -> None:
    head = HEAD.replace(b"Content-Length: %d" % len(BODY), b"Content-Length: 300000")
    sentence = "the body is larger than 100,000 bytes, which is the most"
    assert error_of(raw(guarded.port, head, b"x" * 300_000)) == (413, sentence)


def test_tasks_of_another_process_appear_without_a_failed_request(tmp_path: Path) -> None:
    net = network(3)
    rankup.save(net, tmp_path / "net")
    with serving(tmp_path / "net") as server:
        asked: list[int] = []
        failures: list[BaseException] = []
        done = threading.Event()

        def work() -> None:
            try:
                while not done.is_set():
                    asked.append(len(ask(server.url)))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            add_task(net)
            rankup.save(net, tmp_path / "net")
        for _ in range(100):
            with urllib.request.urlopen(f"{server.url}/health") as answer:
                if json.load(answer)["tasks"] == 21:
                    break
            time.sleep(0.05)
        assert len(ask(server.url, "task 21")) == 1
        done.set()
        for thread in threads:
            thread.join()
        assert not failures
        assert len(asked) > 20
        assert server.end() == 0


def test_other_machines_need_a_token(call: Any, folder: Path) -> None:
    done = call("serve", folder, "--host", "0.0.0.0")
    assert done.code == 1
    assert "0.0.0.0 can be reached from other machines: give a token" in done.err
    done = call("serve", folder, "--token", "with space")
    assert "a token must be printable ASCII without spaces" in done.err


def test_port_in_use_is_one_sentence(call: Any, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = call("serve", folder, "--port", port)
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert f"port {port} of 127.0.0.1 cannot be used (Address already in use)" in done.err
    assert "name another with --port" in done.err


def test_folder_without_a_network_is_one_sentence(call: Any, tmp_path: Path) -> None:
    done = call("serve", tmp_path)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "there is no network in" in done.err
