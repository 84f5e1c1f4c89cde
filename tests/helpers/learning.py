"""Small networks about to learn a task, and their state after some steps."""

import torch
from torch import Tensor, nn

import rankup
from rankup.rank import Rank
from rankup.training.batches import Feed
from rankup.training.engine.cuda_graph import Graph
from rankup.training.engine.eager import Eager
from rankup.training.engine.learner import Learner
from rankup.training.engine.rank import RankLearner
from rankup.training.recipe import Recipe

CPU = torch.device("cpu")
RATE = 2.0**-7  # exact in float32, in which a captured graph keeps its rates
F64 = torch.float64
RANK, RECIPE = Rank(3, 1), Recipe(batch=8)
RANKS = [Rank(3, 1), Rank(0, 0, seeded=[20, 9]), Rank(2, 1, seeded=5), Rank(3, 0), Rank(2, 2)]


def task(seed: int, classes: int = 3, size: int = 12, samples: int = 96) -> rankup.Task:
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, size, generator=draw)
    y = torch.arange(samples) % classes
    x = centres[y] + 0.3 * torch.randn(samples, size, generator=draw)
    return rankup.Task(f"{seed}", classes, x, y, x[:9], y[:9])


def learners(
    kind: type[RankLearner],
    count: int = 1,
    *,
    rank: Rank = RANK,
    tasks: int = 2,
    pad: int = 1,
    recipe: Recipe = RECIPE,
    device: torch.device = CPU,
) -> list[Learner]:
    """Networks that differ in seed and data, each about to learn one more task."""
    made: list[Learner] = []
    for seed in range(count):
        module = rankup.models.mlp(12, hidden=[10, 8]).to(F64)
        net = rankup.grow(module, rank, seed=seed).to(device)
        for index in range(tasks):
            net.begin_task(f"{index}", 3, selectors=0.5)
            for parameter in net.parameters():
                nn.init.normal_(parameter, generator=torch.Generator(device).manual_seed(index))
            net.commit_task()
        net.begin_task("open", 3, selectors="previous")
        feed = Feed(task(seed), recipe, device, F64)
        made.append(kind(net.train(), feed, pad))
    return made


def after_steps(steps: Eager | Graph, count: int = 12) -> tuple[Tensor, list[Tensor]]:
    """Losses, and every learner's parameters after an epoch of `count` steps."""
    device = steps.learners[0].feed.device
    draws = [
        learner.sample_epoch(torch.Generator(device).manual_seed(seed))
        for seed, learner in enumerate(steps.learners)
    ]
    short = [{name: entries[:count] for name, entries in drawn.items()} for drawn in draws]
    losses = steps.epoch(short, [[RATE] * count] * len(short), 0)
    steps.adopt()
    return losses, [
        torch.cat([p.detach().flatten() for p in learner.parameters()])
        for learner in steps.learners
    ]


def assert_agree(one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]]) -> None:
    torch.testing.assert_close(one[0].double(), other[0].double(), rtol=1e-6, atol=1e-6)
    for a, b in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
