"""Taking up tasks that another process has saved."""

import threading
from pathlib import Path

import pytest
import torch

import rankup
from helpers.serving import SIDE, add_task, network
from rankup.errors import StoreError
from rankup.storage import reading
from rankup.storage.refresh import refresh, signature

X = torch.linspace(-1, 1, 3 * SIDE * SIDE).view(3, -1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rankup.save(network(3, 2), tmp_path / "net")
    return tmp_path / "net"


def learn_more(folder: Path, count: int = 1) -> None:
    """As another process does."""
    other = rankup.load(folder)
    for _ in range(count):
        add_task(other, 4)
        rankup.save(other, folder)


def test_new_tasks_answer_as_if_loaded_with_the_others(folder: Path) -> None:
    net = rankup.load(folder)
    before = net(X, task="task 1")
    learn_more(folder, 2)
    assert refresh(net, folder) == ["task 3", "task 4"]
    again = rankup.load(folder)
    assert net.tasks == again.tasks
    for name in net.tasks:
        assert torch.equal(net(X, task=name), again(X, task=name))
    assert torch.equal(net(X, task="task 1"), before)
    assert refresh(net, folder) == []


def test_only_new_files_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = rankup.load(folder)
    learn_more(folder)
    read, of_file = [], reading.read_content
    monkeypatch.setattr(
        reading, "read_content", lambda p, f: (read.append(p.name), of_file(p, f))[1]
    )
    refresh(net, folder)
    assert [name.partition("-")[0] for name in read] == ["task_3"]


def test_refreshed_network_can_go_on_and_be_saved(folder: Path) -> None:
    net = rankup.load(folder)
    learn_more(folder)
    refresh(net, folder)
    add_task(net)
    rankup.save(net, folder)
    assert rankup.verify(folder)
    assert rankup.load(folder).tasks == ["task 1", "task 2", "task 3", "task 4"]


def test_threads_may_ask_while_tasks_are_added(folder: Path) -> None:
    net = rankup.load(folder)
    wanted = net(X, task=["task 1", "task 2", "task 1"])
    failures: list[BaseException] = []
    done = threading.Event()

    def ask() -> None:
        try:
            while not done.is_set():
                torch.testing.assert_close(net(X, task=[0, 1, 0])[:, :3], wanted)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        learn_more(folder)
        refresh(net, folder)
    done.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(net.tasks) == 12


def test_other_changes_are_refused(folder: Path, tmp_path: Path) -> None:
    net = rankup.load(folder)
    learn_more(folder)
    more = rankup.load(folder)
    rankup.save(network(3, 2, seed=5), tmp_path / "other")
    for path, loaded, why in (
        (tmp_path / "other", net, "another network"),
        (tmp_path / "fewer", more, "lost tasks"),
    ):
        if not path.exists():
            rankup.save(network(3, 2), path)
        before = loaded.tasks
        with pytest.raises(StoreError, match=why):
            refresh(loaded, path)
        assert loaded.tasks == before


def test_damaged_file_leaves_the_network_as_it_was(folder: Path) -> None:
    net = rankup.load(folder)
    learn_more(folder)
    next((folder / "tasks").glob("task_3-*")).write_bytes(b"damaged")
    with pytest.raises(StoreError, match="truncated"):
        refresh(net, folder)
    assert net.tasks == ["task 1", "task 2"]
    assert net(X, task="task 2").shape == (3, 2)


def test_signature_changes_with_every_save(folder: Path) -> None:
    first = signature(folder)
    learn_more(folder)
    assert first is not None
    assert signature(folder) not in (first, None)
    assert signature(folder / "nowhere") is None


def test_what_is_said_of_tasks_is_taken_up(folder: Path) -> None:
    net = rankup.load(folder)
    other = rankup.load(folder)
    other.annotate("task 1", title="The first", accuracy=0.5)
    first = signature(folder)
    rankup.save(other, folder)
    assert signature(folder) != first
    assert refresh(net, folder) == []
    known = net.describe("task 1")
    assert (known.title, known.accuracy) == ("The first", 0.5)
