"""Tasks added through the server: unpacked, learned in a process of its own, then answered for."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankup
from helpers.pictures import encoded
from helpers.serving import GREY, SIDE, image, network
from inference.test_uploads import zipped
from rankup.errors import RankupError
from rankup.inference import learn_images, learning


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A network that takes images."""
    net = network(3, 2, 5)
    net.inputs = GREY
    rankup.save(net, tmp_path / "net")
    return tmp_path / "net"


def photos(count: int = 12) -> list[tuple[Any, bytes]]:
    """Bright and dark images, which are easy to tell apart."""
    draw = np.random.default_rng(0)
    return [
        (f"{name}/{n}.png", encoded(draw.integers(low, low + 80, (SIDE, SIDE), dtype=np.uint8)))
        for name, low in (("bright", 170), ("dark", 0))
        for n in range(count)
    ]


def write(folder: Path, entries: Sequence[tuple[Any, bytes]]) -> Path:
    for name, content in entries:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def tells(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Learning runs this code in place of the real thing."""
    monkeypatch.setattr(learning, "_COMMAND", (sys.executable, "-c", code))


def post(client: Any, name: str = "light", **data: str) -> Any:
    files = {"zip": ("photos.zip", zipped(photos()))}
    return client.post("/learn", data={"name": name, **data}, files=files)


def finished(client: Any) -> dict[str, Any]:
    for _ in range(400):
        (told,) = client.get("/learn").json()["tasks"]
        if told["stage"] in ("done", "failed"):
            return dict(told)
        time.sleep(0.02)
    raise AssertionError(told)


def test_worker_learns_tests_and_saves(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(learn_images, "tell", lambda **message: told.append(message))
    images = write(tmp_path / "images", photos())
    learn_images.learn_images(folder, images, "light", 40)
    assert [message["stage"] for message in told][:2] == ["reading", "learning"]
    losses = [message["loss"] for message in told if "loss" in message]
    assert len(losses) == 40
    assert losses[-1] < losses[0]
    assert told[-1]["stage"] == "done"
    assert told[-1]["accuracy"] >= 0.75
    net = rankup.load(folder)
    assert net.tasks[-1] == "light"
    assert rankup.verify(folder)


def test_worker_refuses_what_it_cannot_learn(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = write(tmp_path / "images", photos())
    rankup.save(network(3), tmp_path / "of numbers")
    with pytest.raises(RankupError, match="does not take images"):
        learn_images.learn_images(tmp_path / "of numbers", images, "light", 1)
    with pytest.raises(RankupError, match="already a task 'task 1'"):
        learn_images.learn_images(folder, images, "task 1", 1)
    monkeypatch.setattr(learn_images, "_MOST_NUMBERS", 100)
    with pytest.raises(RankupError, match="24 images of 4×4 pixels are too many"):
        learn_images.learn_images(folder, images, "light", 1)


def test_progress_of_a_task_is_told(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        '{"stage": "learning", "epoch": 1, "epochs": 2, "loss": 0.5}',
        "a library says something",
        '{"stage": "learning", "epoch": 2, "epochs": 2, "loss": 0.25}',
        '{"stage": "done", "accuracy": 0.9}',
    ]
    tells(monkeypatch, f"print({chr(10).join(lines)!r})")
    client = serve(learn=True)
    response = post(client, epochs="2")
    assert response.status_code == 202
    assert response.json()["counts"] == {"bright": 12, "dark": 12}
    told = finished(client)
    assert told["losses"] == [0.5, 0.25]
    assert (told["stage"], told["accuracy"]) == ("done", 0.9)


def test_process_that_dies_is_told_and_its_images_are_removed(
    serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(learning.tempfile, "tempdir", str(tmp_path))
    tells(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    client = serve(learn=True)
    assert post(client).status_code == 202
    told = finished(client)
    assert told["error"] == "the process that learned it has died"
    for _ in range(100):
        if not list(tmp_path.glob("rankup-learn-*")):
            break
        time.sleep(0.02)
    assert not list(tmp_path.glob("rankup-learn-*"))
    assert client.get("/health").json()["tasks"] == 3


def test_one_task_is_learned_at_a_time_and_ends_with_the_server(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tells(monkeypatch, "import time; time.sleep(60)")
    client = serve(learn=True)
    assert post(client).status_code == 202
    response = post(client, "other")
    assert response.status_code == 409
    assert "another task is being learned" in response.json()["error"]
    began = time.monotonic()
    client.__exit__(None, None, None)
    assert time.monotonic() - began < 10


def test_bad_requests_to_learn_are_refused(serve: Any) -> None:
    client = serve(learn=True)
    good = zipped(photos()).getvalue()
    for data, content, why in (
        ({"name": "task 1"}, good, "already a task 'task 1'"),
        ({"name": ""}, good, "needs a name"),
        ({"name": "a/b"}, good, "must not contain a slash"),
        ({"name": "new", "epochs": "many"}, good, "from 1 to 1000, got 'many'"),
        ({"name": "new"}, b"no zip", "the zip cannot be read"),
        ({"name": "new"}, zipped([("../a/1.png", image())]).getvalue(), "leads out of it"),
    ):
        response = client.post("/learn", data=data, files={"zip": ("a.zip", content)})
        assert response.status_code == 400
        assert why in response.json()["error"]
    response = client.post("/learn", data={"name": "new"})
    assert "one file named zip" in response.json()["error"]
    assert client.get("/learn").json() == {"allowed": True, "tasks": []}


def test_server_that_may_not_learn_says_so(serve: Any) -> None:
    client = serve()
    assert client.get("/learn").json() == {"allowed": False}
    assert "--allow-learning" in post(client).json()["error"]
