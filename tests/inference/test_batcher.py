"""The queue: requests of different tasks run together, and none spoils another."""

import asyncio
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.serving import SIDE, network
from rankup.errors import RankupError
from rankup.inference.batcher import Batcher, Closed, QueueFull, logits_of

INPUTS = SIDE * SIDE
TWO = ["task 2", "task 3"]


class Counting:
    """A network that notes its calls, and may be held up."""

    def __init__(self) -> None:
        self.net = network(3, 2, 5)
        self.calls: list[tuple[tuple[int, ...], Any]] = []
        self.go = threading.Event()
        self.go.set()

    def __call__(self, x: Tensor, task: Any) -> Tensor:
        self.go.wait(10)
        self.calls.append((tuple(x.shape), task))
        if x.isnan().any():
            raise RankupError("an input is not a number")
        logits: Tensor = self.net(x, task=task)
        return logits


def ask(batcher: Batcher, count: int) -> list[Future[Tensor]]:
    draw = torch.Generator().manual_seed(0)
    names = [f"task {1 + index % 3}" for index in range(count)]
    return [batcher.submit(torch.rand(INPUTS, generator=draw), name) for name in names]


def test_requests_that_arrive_together_run_as_one_mixed_batch() -> None:
    net = Counting()
    with Batcher(net, most=6, wait_ms=10_000) as batcher:
        answers = [future.result(10) for future in ask(batcher, 6)]
    ((shape, tasks),) = net.calls
    assert shape == (6, INPUTS)
    assert tasks == ["task 1", "task 2", "task 3"] * 2
    draw = torch.Generator().manual_seed(0)
    for answer, name, classes in zip(answers, tasks, [3, 2, 5] * 2, strict=True):
        alone = net.net(torch.rand(INPUTS, generator=draw)[None], task=name)[0]
        torch.testing.assert_close(answer[:classes], alone)
        assert (answer[classes:] == -torch.inf).all()


def test_batch_starts_when_its_time_is_over() -> None:
    with Batcher(Counting(), most=100, wait_ms=30) as batcher:
        began = time.monotonic()
        for future in ask(batcher, 2):
            future.result(10)
        assert 0.03 <= time.monotonic() - began < 5


def test_no_batch_is_larger_than_the_largest() -> None:
    net = Counting()
    net.go.clear()
    with Batcher(net, most=4, wait_ms=0) as batcher:
        futures = ask(batcher, 11)
        net.go.set()
        for future in futures:
            future.result(10)
    assert sum(shape[0] for shape, _ in net.calls) == 11
    assert max(shape[0] for shape, _ in net.calls) == 4


def test_single_request_takes_the_one_task_path() -> None:
    net, x = Counting(), torch.ones(INPUTS)
    with Batcher(net, wait_ms=0) as batcher:
        answer = batcher.submit(x, "task 2").result(10)
    assert net.calls == [((1, INPUTS), "task 2")]
    assert torch.equal(answer, net.net(x[None], task="task 2")[0])


def test_inputs_of_other_shapes_run_apart() -> None:
    net = Counting()
    with Batcher(net, most=4, wait_ms=10_000) as batcher:
        shapes = [(INPUTS,), (1, SIDE, SIDE), (INPUTS,), (1, SIDE, SIDE)]
        futures = [batcher.submit(torch.ones(shape), "task 1") for shape in shapes]
        answers = [future.result(10) for future in futures]
    assert [shape for shape, _ in net.calls] == [(2, INPUTS), (2, 1, SIDE, SIDE)]
    torch.testing.assert_close(answers[0], answers[1])


def test_error_of_one_request_does_not_spoil_others() -> None:
    net = Counting()
    with Batcher(net, most=5, wait_ms=10_000) as batcher:
        futures = ask(batcher, 3)
        futures.append(batcher.submit(torch.full((INPUTS,), torch.nan), "task 1"))
        futures.append(batcher.submit(torch.ones(INPUTS), "no such task"))
        for future, classes in zip(futures, (3, 2, 5), strict=False):
            assert future.result(10).shape == (classes,)
        with pytest.raises(RankupError, match="not a number"):
            futures[3].result(10)
        with pytest.raises(RankupError, match="no task 'no such task'"):
            futures[4].result(10)


def test_many_inputs_of_one_caller_share_a_batch_with_others() -> None:
    net, draw = Counting(), torch.Generator().manual_seed(0)
    x = torch.rand(6, INPUTS, generator=draw)
    names = ["task 1", "task 3", "task 1", "task 2", "task 3", "task 2"]
    with Batcher(net, most=6, wait_ms=10_000) as batcher:
        first = batcher.submit(x[0], names[0])
        several = batcher.submit_many(x[1:5], names[1:5])
        assert len(batcher) == 5
        last = batcher.submit(x[5], names[5])
        rows = [first.result(10), *several.result(10), last.result(10)]
    assert net.calls == [((6, INPUTS), names)]
    assert torch.equal(torch.stack(rows), net.net(x, task=names))


@pytest.mark.parametrize(("sizes", "batches"), [((11,), [4, 4, 3]), ((3, 2, 2, 5), [3, 4, 4, 1])])
def test_many_inputs_never_make_a_batch_too_large(
    sizes: tuple[int, ...], batches: list[int]
) -> None:
    net = Counting()
    net.go.clear()
    with Batcher(net, most=4, wait_ms=10_000) as batcher:
        futures = [batcher.submit_many(torch.ones(n, INPUTS), ["task 1"] * n) for n in sizes]
        net.go.set()
        batcher.close()
    assert [len(future.result()) for future in futures] == list(sizes)
    assert [shape[0] for shape, _ in net.calls] == batches


def test_batches_are_brought_to_the_device() -> None:
    devices = []

    def net(x: Tensor, task: Any) -> Tensor:
        devices.append(x.device.type)
        return torch.zeros(len(x), 2)

    with Batcher(net, most=2, wait_ms=10_000, device="meta") as batcher:
        batcher.submit_many(torch.ones(2, INPUTS), TWO).result(10)
    assert devices == ["meta"]


def test_many_inputs_fail_as_one_and_spoil_no_other() -> None:
    net = Counting()
    with Batcher(net, most=4, wait_ms=10_000) as batcher:
        bad = batcher.submit_many(torch.ones(2, INPUTS), ["task 1", "no such task"])
        good = batcher.submit_many(torch.ones(2, INPUTS), ["task 1", "task 3"])
        assert [row.isfinite().sum() for row in good.result(10)] == [3, 5]
        with pytest.raises(RankupError, match="no task 'no such task'"):
            bad.result(10)
        for x, tasks in ((torch.ones(2, INPUTS), ["task 1"]), (torch.ones(0, INPUTS), [])):
            with pytest.raises(RankupError, match=f"got {len(tasks)} tasks for {len(x)} inputs"):
                batcher.submit_many(x, tasks)


def test_queue_on_the_loop_runs_when_full_or_due() -> None:
    async def main() -> None:
        net, loop = Counting(), asyncio.get_running_loop()
        with Batcher(net, most=4, wait_ms=200, loop=loop, inline=True) as batcher:
            began = time.monotonic()
            await asyncio.gather(*ask(batcher, 7), batcher.submit_many(torch.ones(2, INPUTS), TWO))
            assert time.monotonic() - began < 0.2  # full
            await batcher.submit(torch.ones(INPUTS), "task 1")
            assert time.monotonic() - began >= 0.2  # due
        assert [shape[0] for shape, _ in net.calls] == [4, 3, 2, 1]

    asyncio.run(main())


def test_queue_is_bounded() -> None:
    net = Counting()
    net.go.clear()
    with Batcher(net, most=1, wait_ms=0, longest_queue=3) as batcher:
        futures = ask(batcher, 1)
        while len(batcher):  # until the thread has taken it
            time.sleep(0.001)
        futures += ask(batcher, 3)
        with pytest.raises(QueueFull, match="and 3 do already"):
            batcher.submit_many(torch.ones(1, INPUTS), ["task 1"])
        with pytest.raises(QueueFull, match="at most 3 inputs wait at once, and 3 do already"):
            ask(batcher, 1)
        net.go.set()
        assert all(future.result(10) is not None for future in futures)


def test_closing_answers_what_is_waiting() -> None:
    net = Counting()
    batcher = Batcher(net, most=100, wait_ms=60_000)
    futures = ask(batcher, 5)
    batcher.close()
    assert all(future.done() and future.exception() is None for future in futures)
    with pytest.raises(Closed):
        ask(batcher, 1)


def test_answers_reach_an_event_loop_in_one_go() -> None:
    async def main() -> tuple[int, list[Tensor]]:
        loop = asyncio.get_running_loop()
        calls, call_soon = [], loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (calls.append(args), call_soon(*args))[1]  # type: ignore[assignment,method-assign]
        with Batcher(Counting(), most=6, wait_ms=10_000, loop=loop) as batcher:
            futures = ask(batcher, 6)
            futures[0].cancel()  # who asked has gone
            answers = await asyncio.gather(*futures[1:])
        return len(calls), answers

    calls, answers = asyncio.run(main())
    assert (calls, len(answers)) == (1, 5)


def test_network_can_be_replaced_while_it_answers() -> None:
    first, second = Counting(), Counting()
    with Batcher(first, most=1, wait_ms=0) as batcher:
        ask(batcher, 1)[0].result(10)
        batcher.net = second
        ask(batcher, 1)[0].result(10)
    assert (len(first.calls), len(second.calls)) == (1, 1)


@pytest.mark.parametrize("wrong", [{"most": 0}, {"wait_ms": -1}, {"longest_queue": 0}])
def test_sizes_without_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RankupError, match="a queue needs"):
        Batcher(Counting(), **wrong)


def test_answer_without_logits_is_refused() -> None:
    with pytest.raises(RankupError, match="answers with a dict, expected a tensor of logits"):
        logits_of({"scores": torch.ones(2)})
