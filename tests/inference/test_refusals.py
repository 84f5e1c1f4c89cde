"""Bad requests: each gets a status and one clear sentence, and nothing else suffers."""

import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.pictures import encoded
from helpers.serving import SIDE, image
from rankup.inference.limits import Limits

NUMBERS = [0.5] * SIDE * SIDE


def bomb(side: int) -> bytes:
    """An image that is small until it is decoded."""
    buffer = io.BytesIO()
    Image.new("1", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


JSON: dict[str, tuple[Any, str]] = {
    "no object": ([1, 2], "must be a JSON object"),
    "nothing": ({}, "got none of them"),
    "two inputs": ({"text": "a", "tensor": [1], "task": "task 1"}, "got text and tensor"),
    "unknown entry": ({"tensor": NUMBERS, "taks": "task 1"}, "there is no 'taks'"),
    "unknown task": ({"tensor": NUMBERS, "task": "task 9"}, "there is no task 'task 9', only"),
    "task that is no name": ({"tensor": NUMBERS, "task": 3}, "given by its name, got 3"),
    "no task": ({"tensor": NUMBERS}, "the network has 3 tasks: name one"),
    "both": ({"tensor": NUMBERS, "task": "task 3", "tasks": ["task 3"]}, "not both"),
    "no tasks": ({"tensor": NUMBERS, "tasks": []}, "tasks must be a list of names"),
    "wrong shape": ({"tensor": [1, 2], "task": "task 3"}, "of shape [2], expected [16]"),
    "ragged": ({"tensor": [[1], [1, 2]], "task": "task 3"}, "equally long"),
    "strings": ({"tensor": ["a"] * 16, "task": "task 3"}, "nested lists of numbers"),
    "objects": ({"tensor": [{}] * 16, "task": "task 3"}, "nested lists of numbers"),
    "huge number": ({"tensor": [10**400] * 16, "task": "task 3"}, "nested lists of numbers"),
    "no list": ({"tensor": 3, "task": "task 3"}, "got a number"),
    "wrong kind": ({"tensor": NUMBERS, "task": "task 1"}, "takes grey images"),
    "text": ({"text": "hello", "task": "task 1"}, "got a text"),
    "text that is none": ({"text": 5, "task": "task 1"}, "text must be a string, got a number"),
    "no base64": ({"image": "ä", "task": "task 1"}, "in base64"),
    "no image": ({"image": "aGVsbG8=", "task": "task 1"}, "broken or in an unknown format"),
    "no items": ({"items": []}, "at least one object"),
    "item that is none": ({"items": [3], "task": "task 3"}, "must be an object"),
    "input beside items": ({"items": [{}], "tensor": NUMBERS}, "belongs into each of the items"),
    "top": ({"tensor": NUMBERS, "task": "task 3", "top": 0}, "from 1 to 1000, got 0"),
    "too many": (
        {"items": [{"tensor": NUMBERS}] * 300, "task": "task 3"},
        "asks 300 times (inputs by tasks), expected at most 256",
    ),
}


@pytest.mark.parametrize("given", JSON.values(), ids=JSON.keys())
def test_bad_json_is_refused_in_one_sentence(client: Any, given: tuple[Any, str]) -> None:
    response = client.post("/predict", json=given[0])
    assert response.status_code == 400
    assert list(response.json()) == ["error"]
    assert given[1] in response.json()["error"]
    assert "\n" not in response.json()["error"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b'{"tensor": NaN}'])
def test_what_is_not_json_is_refused(client: Any, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = client.post("/predict", content=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(client: Any, value: str) -> None:
    body = f'{{"task": "task 3", "tensor": [{", ".join([value] * 16)}]}}'
    headers = {"content-type": "application/json"}
    response = client.post("/predict", content=body, headers=headers)
    assert response.json() == {"error": "the tensor holds NaN or infinity"}


def test_answers_that_are_not_numbers_are_refused(client: Any) -> None:
    items = [{"tensor": NUMBERS}, {"tensor": [3e38, -3e38] * (SIDE * SIDE // 2)}]
    response = client.post("/predict", json={"items": items, "task": "task 3"})
    assert response.status_code == 400
    assert "the input's numbers are too large" in response.json()["error"]


IMAGES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "broken or in an unknown format"),
    "truncated": (encoded(np.zeros((64, 64, 3), np.uint8))[:-40], "broken"),
    "text": (b"hello", "broken or in an unknown format"),
    "many pixels": (bomb(7000), "has 7000×7000 pixels, expected at most 33,554,432"),
    "bomb": (bomb(20_000), "more than 33,554,432 pixels"),
}


@pytest.mark.parametrize("given", IMAGES.values(), ids=IMAGES.keys())
def test_bad_image_is_refused_and_the_next_one_answered(
    client: Any, given: tuple[bytes, str]
) -> None:
    data = {"task": "task 1"}
    response = client.post("/predict", files={"image": ("a.png", given[0])}, data=data)
    assert response.status_code == 400
    assert given[1] in response.json()["error"]
    response = client.post("/predict", files={"image": ("a.png", image())}, data=data)
    assert response.status_code == 200


def test_bad_forms_are_refused(client: Any) -> None:
    two = [("image", ("a.png", image())), ("image", ("b.png", image()))]
    for files, data, why in (
        ([("other", ("a.png", image()))], {"task": "task 1"}, "neither an image nor a text"),
        (two, {"task": ["task 1"] * 3}, "got 3 times task for 2 inputs"),
        (two, {}, "name one"),
        ([*two, ("task", ("a", b"task 1"))], {}, "task must be text in the form, got a file"),
    ):
        response = client.post("/predict", files=files, data=data)
        assert response.status_code == 400
        assert why in response.json()["error"]
    headers = {"content-type": "multipart/form-data; boundary=x"}
    response = client.post("/predict", content=b"nonsense", headers=headers)
    assert response.status_code == 400
    assert "cannot be read" in response.json()["error"]


def test_other_paths_methods_and_types_are_refused(client: Any) -> None:
    assert client.get("/nowhere").status_code == 404
    assert "see /docs" in client.get("/nowhere").json()["error"]
    assert client.get("/predict").status_code == 405
    response = client.post("/predict", content=b"a", headers={"content-type": "text/plain"})
    assert response.status_code == 415
    assert "text/plain, expected application/json" in response.json()["error"]
    assert client.post("/learn", data={"name": "new"}).status_code == 403


def test_long_bodies_are_refused(serve: Any) -> None:
    client = serve(limits=Limits(body=1000))
    response = client.post("/predict", json={"tensor": [0.5] * 1000, "task": "task 3"})
    assert response.status_code == 413
    assert response.json()["error"] == "the body is larger than 1,000 bytes, which is the most"
    body = (b"x" * 100 for _ in range(20))  # without a length
    assert client.post("/predict", content=body).status_code in (413, 415)
    headers = {"content-type": "application/json"}
    body = (b"x" * 100 for _ in range(20))
    assert client.post("/predict", content=body, headers=headers).status_code == 413
    small = json.dumps({"tensor": NUMBERS, "task": "task 3"})
    assert client.post("/predict", content=small, headers=headers).status_code == 200


def test_all_bodies_together_are_bounded(serve: Any) -> None:
    client = serve(limits=Limits(bodies=50))
    response = client.post("/predict", json={"tensor": NUMBERS, "task": "task 3"})
    assert response.status_code == 503
    assert "too much at once" in response.json()["error"]


def test_full_queue_is_a_503(serve: Any) -> None:
    client = serve(limits=Limits(queue=3), wait_ms=50)
    items = [{"tensor": NUMBERS}] * 8
    response = client.post("/predict", json={"items": items, "task": "task 3"})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert "at most 3 inputs wait at once" in response.json()["error"]
    response = client.post("/predict", json={"tensor": NUMBERS, "task": "task 3"})
    assert response.status_code == 200


def test_token_is_needed_for_all_but_the_page(serve: Any) -> None:
    client = serve(token="secret")
    for path in ("/tasks", "/sharing", "/metrics", "/learn", "/docs", "/openapi.json", "/nowhere"):
        assert client.get(path).status_code == 401
    for path in ("/", "/page.js", "/page.css", "/health"):
        assert client.get(path).status_code == 200
    body = {"tensor": NUMBERS, "task": "task 3"}
    for given in ("secret", "Bearer wrong", "Bearer secretx", "Basic secret", ""):
        response = client.post("/predict", json=body, headers={"Authorization": given})
        assert response.status_code == 401
        assert "a token is needed" in response.json()["error"]
    headers = {"Authorization": "Bearer secret"}
    assert client.post("/predict", json=body, headers=headers).status_code == 200


def test_pages_of_other_sites_may_not_ask(serve: Any) -> None:
    client = serve(hosts=frozenset({"localhost"}))
    assert client.get("/tasks", headers={"host": "localhost:80"}).status_code == 200
    response = client.get("/tasks", headers={"host": "evil.example"})  # a name that leads here
    assert (response.status_code, response.json()["error"]) == (
        403,
        "this server is not called 'evil.example'",
    )
    for origin, status in (("http://evil.example", 403), ("http://localhost:80", 200)):
        headers = {"host": "localhost:80", "origin": origin}
        assert client.get("/tasks", headers=headers).status_code == status


def test_failure_of_the_server_is_a_500_without_details(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rankup.inference import questions

    def fail(*_: object) -> None:
        raise KeyError("a secret")

    monkeypatch.setattr(questions, "from_json", fail)
    client = serve()
    response = client.post("/predict", json={"tensor": NUMBERS, "task": "task 3"})
    assert response.status_code == 500
    assert response.json() == {"error": "the server failed at this request: see its log"}
    assert "rankup_failures_total 1.0" in client.get("/metrics").text
