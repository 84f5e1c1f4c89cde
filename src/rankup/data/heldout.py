"""Held-out training data, by which settings are chosen, so that test data is only for reports."""

from dataclasses import replace

import torch
from torch import Tensor

from rankup import seeds
from rankup.data.streams import Stream
from rankup.errors import DataError, RankupError


def hold_out(stream: Stream, share: float, seed: int) -> Stream:
    """The stream with a share of every task's training data in place of its test data.

    Tasks that share their data, as permuted ones do, hold out the same images and go on sharing.

    >>> from rankup.data.streams import make_stream
    >>> whole = make_stream("s-digits")[0]
    >>> task = hold_out(make_stream("s-digits"), 0.25, seed=0)[0]
    >>> len(whole.train_y), len(task.train_y), len(task.test_y)
    (287, 215, 72)
    """
    if not 0 < share < 1:
        raise RankupError(f"the share to hold out must be between 0 and 1, got {share}")
    divided: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    tasks = []
    for index, task in enumerate(stream):
        whole = task.train_x, task.train_y
        key = id(task.train_x), id(task.train_y)
        if key not in divided:
            drawn = seeds.generator(seed, "held out", index)
            order = torch.randperm(len(task.train_y), generator=drawn, device="cpu")
            order = order.to(task.train_y.device)
            count = max(1, round(share * len(order)))
            divided[key] = tuple(t[rows] for rows in (order[count:], order[:count]) for t in whole)
        train_x, train_y, test_x, test_y = divided[key]
        try:
            tasks.append(
                replace(task, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)
            )
        except DataError as error:
            raise DataError(
                f"holding out {share:.0%} of the {len(task.train_y)} training samples of task "
                f"{task.name!r} leaves too few to learn from: {error}"
            ) from error
    return Stream(stream.name, tuple(tasks))
