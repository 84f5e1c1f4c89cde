"""What the server answers: predictions, tasks, metrics, documentation."""

import base64
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

import rankup
from helpers.serving import GREY, SIDE, add_task, guessing, image, network
from rankup.inference.app import Options, create_app
from rankup.inference.served import Served

NUMBERS = [round(0.1 * index, 1) for index in range(SIDE * SIDE)]


def probabilities(folder: Path, x: torch.Tensor, task: str) -> list[float]:
    return rankup.load(folder)(x[None], task=task)[0].softmax(0).tolist()  # type: ignore[no-any-return]


def as_dict(answer: dict[str, Any]) -> dict[str, float]:
    return {entry["name"]: entry["probability"] for entry in answer["classes"]}


def test_image_gets_classes_with_probabilities(client: Any, made: Path) -> None:
    files = {"image": ("a.png", image(1))}
    response = client.post("/predict", files=files, data={"task": "task 1"})
    (answer,) = response.json()["answers"]
    assert (answer["task"], answer["file"], answer["item"]) == ("task 1", "a.png", 0)
    wanted = probabilities(made, GREY.batch([image(1)])[0], "task 1")
    assert as_dict(answer) == pytest.approx(
        dict(zip(("ant", "bee", "cow"), wanted, strict=True)), abs=1e-5
    )
    shares = [entry["probability"] for entry in answer["classes"]]
    assert shares == sorted(shares, reverse=True)


def test_numbers_and_base64_in_json(client: Any, made: Path) -> None:
    response = client.post("/predict", json={"task": "task 3", "tensor": NUMBERS, "top": 2})
    (answer,) = response.json()["answers"]
    wanted = probabilities(made, torch.tensor(NUMBERS), "task 3")
    best = sorted(range(5), key=wanted.__getitem__, reverse=True)[:2]
    assert [entry["name"] for entry in answer["classes"]] == [str(index) for index in best]
    encoded = base64.b64encode(image(1)).decode()
    response = client.post("/predict", json={"task": "task 1", "image": encoded})
    (answer,) = response.json()["answers"]
    wanted = probabilities(made, GREY.batch([image(1)])[0], "task 1")
    assert as_dict(answer)["bee"] == pytest.approx(wanted[1], abs=1e-5)


def test_several_tasks_and_a_task_for_each_item(client: Any) -> None:
    files = [("image", ("a.png", image(1))), ("image", ("b.png", image(2)))]

    def asked(response: Any) -> list[tuple[int, str]]:
        return [(each["item"], each["task"]) for each in response.json()["answers"]]

    both = {"tasks": ["task 1", "task 2"]}
    response = client.post("/predict", files=files, data=both)
    assert asked(response) == [(0, "task 1"), (0, "task 2"), (1, "task 1"), (1, "task 2")]
    response = client.post("/predict", files=files, data={"task": ["task 2", "task 1"]})
    assert asked(response) == [(0, "task 2"), (1, "task 1")]
    items = [{"tensor": NUMBERS, "task": "task 3"}, {"image": base64.b64encode(image(1)).decode()}]
    response = client.post("/predict", json={"items": items, "tasks": ["task 1", "task 2"]})
    assert asked(response) == [(0, "task 3"), (1, "task 1"), (1, "task 2")]


def test_each_input_gets_its_own_answer_whatever_its_kind(client: Any) -> None:
    first, second = (
        {"image": base64.b64encode(image(seed)).decode(), "task": "task 1"} for seed in (1, 2)
    )
    items = [first, {"tensor": NUMBERS, "task": "task 3"}, second]
    together = client.post("/predict", json={"items": items}).json()["answers"]
    for number, item in enumerate(items):
        (alone,) = client.post("/predict", json=item).json()["answers"]
        assert together[number]["item"] == number
        assert as_dict(together[number]) == pytest.approx(as_dict(alone), abs=1e-5)
    assert as_dict(together[0]) != pytest.approx(as_dict(together[2]), abs=1e-3)


def test_requests_for_different_tasks_share_a_batch(serve: Any) -> None:
    client = serve(wait_ms=100)
    items = [{"tensor": NUMBERS, "task": "task 3"} for _ in range(20)]
    client.post("/predict", json={"items": items})
    text = client.get("/metrics").text
    assert "rankup_batch_size_count 1.0\n" in text
    assert "rankup_batch_size_sum 20.0\n" in text


def test_tasks_tell_what_they_are(client: Any) -> None:
    data = client.get("/tasks").json()
    first, second, third = data["tasks"]
    assert first["classes"] == ["ant", "bee", "cow"]
    assert (first["title"], first["accuracy"]) == ("Task 1", 0.75)
    assert second["uses"] == ["task 1"]
    assert third["classes"] == ["0", "1", "2", "3", "4"]
    assert (first["inputs"]["kind"], third["inputs"]["kind"]) == ("image", "tensor")
    assert data["network"]["tasks"] == 3
    assert data["network"]["numbers"] == sum(task["numbers"] for task in data["tasks"])


def test_sharing_has_a_row_for_each_task(client: Any) -> None:
    data = client.get("/sharing").json()
    assert data["tasks"] == ["task 1", "task 2", "task 3"]
    assert [len(row) for row in data["shares"]] == [2, 3, 4]


def test_new_tasks_appear_without_a_restart(serve: Any, folder: Path) -> None:
    client = serve()
    other = rankup.load(folder)
    add_task(other, 4)
    rankup.save(other, folder)
    for _ in range(100):
        if client.get("/health").json()["tasks"] == 4:
            break
        time.sleep(0.05)
    response = client.post("/predict", json={"task": "task 4", "tensor": NUMBERS, "top": 9})
    assert len(response.json()["answers"][0]["classes"]) == 4
    assert len(client.get("/tasks").json()["tasks"]) == 4


def test_folder_that_was_replaced_is_loaded_again(folder: Path, tmp_path: Path) -> None:
    loaded: list[Any] = []
    following = Served(folder, loaded.append)
    before = following.now
    rankup.save(network(4, seed=9), tmp_path / "other")
    folder.rename(tmp_path / "old")
    (tmp_path / "other").rename(folder)
    following.look()
    assert list(following.now.tasks) == ["task 1"]
    assert loaded == [following.now.net]
    assert list(before.tasks) == ["task 1", "task 2", "task 3"]


def test_folder_that_cannot_be_read_leaves_answers_as_they_were(folder: Path) -> None:
    following = Served(folder)
    before = following.now
    (folder / "manifest.json").write_text("damaged")
    assert following.look() == []
    assert following.now is before
    assert "truncated or edited" in (following.failure or "")


def test_health_metrics_and_documentation(serve: Any) -> None:
    client = serve()
    assert client.get("/health").json() == {"status": "ok", "tasks": 3}
    text = client.get("/metrics").text
    assert 'rankup_requests_total{path="/health",status="200"} 1.0' in text
    assert "rankup_tasks 3.0" in text
    assert "/predict" in client.get("/openapi.json").json()["paths"]
    page = client.get("/docs").text
    assert "`" not in page  # which only Markdown takes for more than itself
    assert "POST /predict" in page
    assert "<script" not in page


def test_page_loads_nothing_from_elsewhere(client: Any) -> None:
    response = client.get("/")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    for path in ("/", "/page.css", "/page.js", "/icon.svg"):
        text = client.get(path).text.replace("http://www.w3.org/2000/svg", "")
        assert text
        assert "http://" not in text
        assert "https://" not in text
        assert "innerHTML" not in text


def test_task_is_guessed(tmp_path: Path) -> None:
    folder = guessing(tmp_path / "net")
    encoded = [image(1), image(2)]
    items = [{"image": base64.b64encode(each).decode()} for each in encoded]
    app = create_app(folder, Options(hosts=None))
    with TestClient(app, raise_server_exceptions=False) as client:
        assert client.get("/tasks").json()["network"]["guesses"]
        response = client.post("/predict", json={"items": items})
        answers = response.json()["answers"]
        told = client.post("/predict", json=items[0] | {"task": "task 1"}).json()
        assert "guessed" not in told["answers"][0]
        (alone,) = client.post("/predict", json=items[0]).json()["answers"]
    net, x = rankup.load(folder), GREY.batch(encoded)
    guess, untold = net.guess(x), net(x)
    for row, answer in enumerate(answers):
        task = int(guess.task[row])
        assert (answer["item"], answer["task"]) == (row, net.tasks[task])
        assert answer["guessed"]["none"] == pytest.approx(float(guess.none[row]), abs=1e-5)
        wanted = untold.logits[row].exp()[slice(2) if task == 0 else slice(2, 5)]
        sure = float(wanted.sum())
        assert answer["guessed"]["probability"] == pytest.approx(sure, abs=1e-5)
        shares = {str(index): float(share) / sure for index, share in enumerate(wanted)}
        assert as_dict(answer) == pytest.approx(shares, abs=1e-4)
    assert as_dict(alone) == pytest.approx(as_dict(answers[0]), abs=1e-5)


def test_without_a_router_a_task_must_be_named(client: Any) -> None:
    assert not client.get("/tasks").json()["network"]["guesses"]
    response = client.post("/predict", json={"tensor": NUMBERS})
    assert response.status_code == 400
    assert "name one with task" in response.json()["error"]
