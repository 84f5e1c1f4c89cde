"""Requests that a server must refuse, for `serving.py`: of every kind, in random order."""

import asyncio
import base64
import io
import json
import random
import zipfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

AT_ONCE = 16
MEGABYTE = b"f4240\r\n" + bytes(10**6) + b"\r\n"  # a chunk
FORM = "Content-Type: multipart/form-data; boundary=x"
TOKEN = "Authorization: Bearer secret"
Parts = list[bytes]  # sent one after another, with a pause before each but the first


def http(path: str, body: bytes = b"", *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    if not any(line.startswith(("Content-Length", "Transfer-Encoding")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def of_json(data: Any) -> bytes:
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    return http("/predict", body, TOKEN, "Content-Type: application/json")


def form(path: str, parts: list[tuple[str, str | None, bytes]]) -> bytes:
    body = b""
    for name, file, content in parts:
        named = f'; filename="{file}"' if file else ""
        head = f'--x\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
        body += head.encode() + content + b"\r\n"
    return http(path, body + b"--x--\r\n", TOKEN, FORM)


def picture(draw: random.Random, side: int = 32) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(draw.randrange(1000)).integers(0, 256, (side, side, 3))
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, draw.choice(["PNG", "JPEG"]))
    return buffer.getvalue()


def bomb(side: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("1", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


def archive(*entries: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in entries:
            opened.writestr(name, content)
    return buffer.getvalue()


def learn(content: bytes, name: str = "new") -> bytes:
    return form("/learn", [("name", None, name.encode()), ("zip", "a.zip", content)])


def image(content: bytes) -> bytes:
    return form("/predict", [("task", None, b"images"), ("image", "a.png", content)])


def numbers(count: int = 784) -> list[float]:
    return [0.5] * count


Kind = Callable[[random.Random], tuple[Parts, set[int]]]

KINDS: dict[str, Kind] = {
    "no HTTP": lambda d: ([d.randbytes(d.randrange(1, 999)) + b"\r\n\r\n"], {400}),
    "long headers": lambda d: ([http("/tasks", b"", "A: " + "x" * 999_999, method="GET")], {400}),
    "no token": lambda d: ([http("/predict", b"{}")], {401}),
    "wrong token": lambda d: (
        [http("/tasks", b"", f"Authorization: Bearer {d.random()}", method="GET")],
        {401},
    ),
    "other path": lambda d: ([http(f"/{d.random()}", b"", TOKEN, method="GET")], {404}),
    "other method": lambda d: (
        [http("/predict", b"", TOKEN, method=d.choice(["PUT", "DELETE", "GET"]))],
        {405},
    ),
    "other site": lambda d: ([http("/predict", b"{}", TOKEN, "Origin: http://evil")], {403}),
    "no type": lambda d: ([http("/predict", d.randbytes(99), TOKEN)], {415}),
    "long body": lambda d: (
        [http("/predict", bytes(d.randrange(10**6 + 1, 3 * 10**6)), TOKEN)],
        {413},
    ),
    "endless body": lambda d: (
        [http("/predict", MEGABYTE, TOKEN, "Transfer-Encoding: chunked"), MEGABYTE],
        {408, 413, 415},
    ),
    "no JSON": lambda d: ([of_json(d.randbytes(d.randrange(200)))], {400}),
    "deep JSON": lambda d: ([of_json(b"[" * d.randrange(1000, 500_000))], {400}),
    "other JSON": lambda d: ([of_json(d.choice([[], 3, None, "a", {}, {"items": [1]}]))], {400}),
    "unknown task": lambda d: ([of_json({"task": str(d.random()), "tensor": numbers()})], {400}),
    "other shape": lambda d: (
        [of_json({"task": "t00", "tensor": numbers(d.randrange(0, 2000) * 2 + 1)})],
        {400},
    ),
    "ragged": lambda d: ([of_json({"task": "t00", "tensor": [[1], [1, 2], 3]})], {400}),
    "not finite": lambda d: (
        [of_json({"task": "t00", "tensor": [d.choice([1e999, -1e999, 1e999 - 1e999])] * 784})],
        {400},
    ),
    "huge whole numbers": lambda d: ([of_json({"task": "t00", "tensor": [10**999] * 784})], {400}),
    "too many": lambda d: ([of_json({"items": [{"tensor": [1]}] * 999, "task": "t00"})], {400}),
    "broken form": lambda d: (
        [
            http(
                "/predict", d.randbytes(500), TOKEN, "Content-Type: multipart/form-data; boundary=x"
            )
        ],
        {400},
    ),
    "truncated image": lambda d: ([image(picture(d)[: d.randrange(1, 600)])], {400}),
    "flipped image": lambda d: ([image(bytes(b ^ 255 for b in picture(d)))], {400}),
    "image bomb": lambda d: ([image(bomb(d.choice([7000, 12_000, 20_000])))], {400}),
    "image in JSON": lambda d: (
        [of_json({"task": "images", "image": base64.b64encode(d.randbytes(99)).decode()})],
        {400},
    ),
    "zip bomb": lambda d: ([learn(archive(("a/1.png", bytes(50 << 20)), ("b/1.png", b"")))], {400}),
    "zip path": lambda d: ([learn(archive((d.choice(["../a/1.png", "/a/1.png"]), b"")))], {400}),
    "no zip": lambda d: ([learn(d.randbytes(d.randrange(2000)))], {400}),
    "name": lambda d: ([learn(archive(("a/1.png", b"")), d.choice(["", "a/b", "x" * 300]))], {400}),
    "nothing": lambda d: ([], {408}),
    "slow headers": lambda d: ([b"GET /tasks HT", b"TP/1.1\r\nA:"], {408}),
    "slow body": lambda d: (
        [http("/predict", b"--x\r\n", TOKEN, FORM, "Content-Length: 99"), b"Content-"],
        {408},
    ),
}


async def send(port: int, parts: Parts) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for number, part in enumerate(parts):
            if number:
                await asyncio.sleep(0.2)
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()


async def refused(port: int, name: str, parts: Parts, wanted: set[int]) -> str | None:
    """What is wrong with the answer, if anything."""
    try:
        answer = await send(port, parts)
        head, _, body = answer.partition(b"\r\n\r\n")
        status, data = int(head.split()[1]), json.loads(body)
    except Exception as error:
        return f"{name}: {type(error).__name__} {error}"
    if status not in wanted or list(data) != ["error"] or len(data["error"]) > 400:
        return f"{name}: {status} {str(data)[:300]}"
    return None


async def answered(port: int) -> bool:
    answer = await send(port, [of_json({"task": "t00", "tensor": numbers()})])
    return answer.startswith(b"HTTP/1.1 200")


def campaign(port: int, count: int, memory: Callable[[], float]) -> dict[str, Any]:
    """Send bad requests, some at once, a good one after each group; what was wrong, and how much
    memory the server took on the way."""
    draw = random.Random(0)
    names = (list(KINDS) * (count // len(KINDS) + 1))[:count]
    draw.shuffle(names)
    wrong: list[str] = []
    good = 0
    kinds = Counter(names)

    async def main() -> list[float]:
        nonlocal good
        made = [(name, *KINDS[name](draw)) for name in KINDS]  # before any connection waits
        await asyncio.gather(*(refused(port, *each) for each in made))  # warms up
        used = [memory()]
        for first in range(0, count, AT_ONCE):
            made = [(name, *KINDS[name](draw)) for name in names[first : first + AT_ONCE]]
            found = await asyncio.gather(*(refused(port, *each) for each in made))
            wrong.extend(filter(None, found))
            good += await answered(port)
            used.append(memory())
        return used

    used = asyncio.run(main())
    return {
        "bad": count,
        "kinds": len(kinds),
        "wrong": wrong,
        "good ones between": good,
        "of": (count + AT_ONCE - 1) // AT_ONCE,
        "memory_mb": {"before": used[0], "after": used[-1], "most": max(used)},
    }
