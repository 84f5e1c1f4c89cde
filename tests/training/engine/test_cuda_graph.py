"""Steps captured in a CUDA graph agree with eager ones."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.learning import F64, RANKS, RATE, RECIPE, after_steps, assert_agree, learners, task
from helpers.zoo import GPU
from rankup.rank import Rank
from rankup.training.batches import Feed
from rankup.training.engine.cuda_graph import Graph, _streams
from rankup.training.engine.eager import Eager
from rankup.training.engine.learner import Learner
from rankup.training.engine.mlp import ChainLearner
from rankup.training.engine.rank import RankLearner
from rankup.training.engine.select import Engine
from rankup.training.recipe import Recipe


@GPU
def test_graph_runs_learners_with_different_recipes() -> None:
    device = torch.device("cuda")
    recipes = [Recipe(batch=8), Recipe(batch=8, optimiser="sgd"), Recipe(batch=8, weight_decay=0.5)]
    found = []
    for captured in (False, True):
        pupils = [learners(RankLearner, recipe=each, device=device)[0] for each in recipes]
        steps = Graph("branches", pupils, None) if captured else Eager(pupils)
        if captured:
            steps.start(pupils)
        draws = [each.sample_epoch(torch.Generator(device).manual_seed(0)) for each in pupils]
        rates = [[RATE * (number + 1)] * pupils[0].feed.steps_per_epoch for number in range(3)]
        losses = steps.epoch(draws, rates, 0)
        steps.adopt()
        flat = [torch.cat([p.detach().flatten() for p in e.parameters()]) for e in pupils]
        found.append((losses, flat))
    assert_agree(*found)
    assert not torch.allclose(found[0][1][0], found[0][1][2])


@GPU
def test_streams_of_a_graph_are_all_different() -> None:
    device = torch.device("cuda")
    torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # as anybody may take one
    for _ in range(4):
        assert len({stream.cuda_stream for stream in _streams(16, device)}) == 16
    first, *others = _streams(97, device)  # more than there are
    assert len(others) == 96
    assert first.cuda_stream not in {stream.cuda_stream for stream in others}


@GPU
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (ChainLearner, "stacked"),
        (ChainLearner, "branches"),
        (RankLearner, "vmap"),
        (RankLearner, "branches"),
    ],
)
@pytest.mark.parametrize("rank", [RANKS[0], RANKS[1]])
def test_captured_replicas_agree_with_eager_steps(
    kind: type[RankLearner], form: str, rank: Rank
) -> None:
    device = torch.device("cuda")
    recipe = Recipe(batch=4, weight_decay=0.1)
    alone = Eager(learners(RankLearner, 3, rank=rank, recipe=recipe, device=device))
    pupils = learners(kind, 3, rank=rank, recipe=recipe, device=device, pad=16)
    graph = Graph(form, pupils, None)
    graph.start(pupils)
    assert pupils[0].feed.steps_per_epoch == 24
    draws = [
        each.sample_epoch(torch.Generator(device).manual_seed(n)) for n, each in enumerate(pupils)
    ]
    found = []
    for steps in (alone, graph):
        losses = steps.epoch(draws, [[RATE] * 20 + [0.0] * 4] * len(draws), 0)
        steps.adopt()
        flat = [torch.cat([p.detach().flatten() for p in e.parameters()]) for e in steps.learners]
        found.append((losses, flat))
    assert_agree(*found)


@GPU
def test_captured_convolutions_agree_with_eager_steps() -> None:
    device, recipe = torch.device("cuda"), Recipe(batch=32, flip=True, crop=1)
    stream = rankup.data.make_stream("p-digits", tasks=2)
    found = []
    for captured in (False, True):
        pupils: list[Learner] = []
        for seed in range(2):
            body = rankup.models.resnet18(width=4, image_size=8, channels=1).to(F64)
            net = rankup.grow(body, Rank(3, 1), seed=seed).to(device)
            calibrate = torch.rand(16, 1, 8, 8, dtype=F64, device=device)
            net.begin_task("old", 10)
            net.commit_task([calibrate])
            net.begin_task("open", 10, selectors="previous")
            feed = Feed(stream[1], recipe, device, F64)
            pupils.append(RankLearner(net.train(), feed, 16 if captured else 1))
        steps = Graph("branches", pupils, None) if captured else Eager(pupils)
        if captured:
            steps.start(pupils)
        draws = [
            p.sample_epoch(torch.Generator(device).manual_seed(n)) for n, p in enumerate(pupils)
        ]
        rates = [RATE] * 10 + [0.0] * (pupils[0].feed.steps_per_epoch - 10)
        losses = steps.epoch(draws, [rates] * len(draws), 0)
        steps.adopt()
        flat = [torch.cat([p.detach().flatten() for p in e.parameters()]) for e in pupils]
        found.append((losses, flat))
    torch.testing.assert_close(found[0][0].double(), found[1][0].double(), rtol=1e-5, atol=0)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


@GPU
def test_one_graph_serves_tasks_of_different_rank() -> None:
    device = torch.device("cuda")
    net = rankup.grow(rankup.models.mlp(12, hidden=[10, 8]), Rank(2, 1)).to(device)
    engine = Engine()
    graphs = set()
    from rankup.training.fit import NetPupil
    from rankup.training.loop import learn

    pupil = NetPupil(net, Recipe(epochs=15, batch=32), 0)
    for seed in range(4):
        (failure,) = learn([pupil], [task(seed, samples=192)], engine)
        assert failure is None
        graphs.add(engine._graph)
        own = task(seed, samples=192).to(device)
        assert float((net(own.train_x, seed).argmax(1) == own.train_y).float().mean()) > 0.9
    assert len(graphs) == 2  # the first task has another rank, all later ones share a graph


@GPU
def test_module_that_cannot_be_captured_runs_eagerly() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(12, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.a(x))
            return self.head(y * 2 if float(y.detach().sum()) < 0 else y)

    said: list[str] = []
    device = torch.device("cuda")
    net = rankup.grow(Asks(), Rank(2, 1), head="head").to(device)
    net.begin_task("open", 3)
    learner = RankLearner(net.train(), Feed(task(0), Recipe(batch=32), device), 16)
    steps = Engine(said.append).start([learner])
    assert isinstance(steps, Eager)
    assert "cannot be captured" in said[0]
    after_steps(steps, 3)
    torch.manual_seed(1)  # a failed capture leaves nothing behind: drawing works as before
    drawn = torch.rand(3, device=device)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3, device=device), drawn)


@GPU
@pytest.mark.parametrize("net", ["mlp", "resnet18"])
def test_same_seed_gives_the_same_bits(net: str) -> None:
    device = torch.device("cuda")
    stream = rankup.data.make_stream("p-digits", tasks=2)
    answers = []
    for _ in range(2):
        body = {
            "mlp": lambda: rankup.models.mlp(64, hidden=[32, 32]),
            "resnet18": lambda: rankup.models.resnet18(width=4, image_size=8, channels=1),
        }[net]()
        grown = rankup.grow(body, Rank(3, 1)).to(device)
        for each in stream:
            rankup.fit(grown, each, replace(Recipe(epochs=2), precision="bfloat16"))
        x = Feed(stream[1], Recipe(), device)
        answers.append(grown.eval()(next(x.test())[0], 1))
    assert torch.equal(*answers)


def test_other_recipe_is_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    class Captured:
        def __init__(self, form: str, learners: object, signature: object) -> None:
            self.signature = signature

        def start(self, learners: object) -> None: ...

    monkeypatch.setattr("rankup.training.engine.select.Graph", Captured)
    monkeypatch.setattr(Engine, "_form", lambda self, learners: "branches")
    (learner,) = learners(RankLearner)
    engine = Engine()
    first = engine.start([learner])
    assert engine.start([learner]) is first
    learner.feed.recipe = replace(RECIPE, weight_decay=0.5)
    assert engine.start([learner]) is not first


@pytest.mark.parametrize("working", [["branches"], []])
def test_failed_capture_falls_back_and_notes_it_once(
    working: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Captured:
        def __init__(self, form: str, learners: object, signature: object) -> None:
            tried.append(form)
            if form not in working:
                raise RuntimeError(f"no {form}\nand more")
            self.form, self.signature = form, signature

        def start(self, learners: object) -> None: ...

    tried: list[str] = []
    said: list[str] = []
    (learner,) = learners(RankLearner)
    monkeypatch.setattr("rankup.training.engine.select.Graph", Captured)
    monkeypatch.setattr(Engine, "_form", lambda self, learners: "vmap")
    engine = Engine(said.append)
    for _ in range(2):
        steps = engine.start([learner])
        assert isinstance(steps, Captured if working else Eager)
    assert tried == ["vmap", "branches"]
    assert said[0] == "steps are taken side by side, as they cannot be captured: no vmap"
    assert len(said) == (1 if working else 2)
