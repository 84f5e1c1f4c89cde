"""However steps are taken, they are the same steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import rankup
from rankup.chain import ChainLearner, is_chain
from rankup.engine import Engine
from rankup.feed import Draws, Feed, places, take
from rankup.flat import gathered, views
from rankup.graph import Graph
from rankup.learner import ModuleLearner, RankLearner
from rankup.rank import Rank
from rankup.recipe import Recipe
from rankup.steps import Eager, Learner
from zoo import GPU

CPU = torch.device("cpu")
RATE = 2.0**-7  # exact in float32, in which a captured graph keeps its rates
F64 = torch.float64
RANK, RECIPE = Rank(3, 1), Recipe(batch=8)


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
    """Losses, and every learner's parameters after an epoch of so many steps."""
    device = steps.learners[0].feed.device
    draws = [
        learner.draws(torch.Generator(device).manual_seed(seed))
        for seed, learner in enumerate(steps.learners)
    ]
    short = [{name: entries[:count] for name, entries in drawn.items()} for drawn in draws]
    losses = steps.epoch(short, [[RATE] * count] * len(short), 0)
    steps.keep()
    return losses, [
        torch.cat([p.detach().flatten() for p in learner.parameters()])
        for learner in steps.learners
    ]


def assert_agree(one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]]) -> None:
    torch.testing.assert_close(one[0].double(), other[0].double(), rtol=1e-6, atol=1e-6)
    for a, b in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


RANKS = [Rank(3, 1), Rank(0, 0, seeded=[20, 9]), Rank(2, 1, seeded=5), Rank(3, 0), Rank(2, 2)]


@pytest.mark.parametrize("tasks", [0, 2])
@pytest.mark.parametrize("rank", RANKS)
def test_the_step_written_by_hand_is_autograds(rank: Rank, tasks: int) -> None:
    recipe = Recipe(batch=8, weight_decay=0.1)
    plain = learners(RankLearner, rank=rank, tasks=tasks, recipe=recipe)
    by_hand = learners(ChainLearner, rank=rank, tasks=tasks, recipe=recipe)
    assert_agree(after_steps(Eager(plain)), after_steps(Eager(by_hand)))


def test_the_step_written_by_hand_takes_augmented_images() -> None:
    stream = rankup.data.make_stream("p-digits", tasks=1)
    recipe = Recipe(batch=32, flip=True, crop=2, pixels="centred")
    found = []
    for kind in (RankLearner, ChainLearner):
        net = rankup.grow(rankup.models.mlp(64, hidden=[16]).to(F64), Rank(3, 1))
        net.begin_task("open", 10)
        feed = Feed(stream[0], recipe, CPU, F64)
        assert is_chain(net, feed)
        found.append(after_steps(Eager([kind(net.train(), feed)])))
    assert_agree(*found)


@pytest.mark.parametrize("tasks", [0, 1])
@pytest.mark.parametrize("pixels", ["unit", "centred", "raw"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_step_written_by_hand_takes_bytes(tasks: int, pixels: str, bias: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 256, (60, 12), generator=draw, dtype=torch.uint8), torch.arange(60) % 3
    data = rankup.Task("bytes", 3, x, y, x[:9], y[:9])
    found = []
    for kind in (RankLearner, ChainLearner):
        layers = [nn.Linear(12, 10, bias), nn.ReLU(), nn.Linear(10, 8, bias), nn.ReLU()]
        module = nn.Sequential(*layers, nn.Linear(8, 3, bias)).to(F64)
        net = rankup.grow(module, Rank(3, 1), seed=1)
        for index in range(tasks):
            net.begin_task(f"{index}", 3)
            net.commit_task()
        net.begin_task("open", 3)
        feed = Feed(data, Recipe(batch=10, pixels=pixels), CPU, F64)
        assert is_chain(net, feed)
        found.append(after_steps(Eager([kind(net.train(), feed)]), count=6))
    (losses, (one,)), (others, (other,)) = found
    # Bytes are scaled in float32 where they are scaled before anything else.
    torch.testing.assert_close(losses, others, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_a_small_step_takes_one_thread_and_leaves_the_others_as_they_were() -> None:
    seen = []

    class Watched(ChainLearner):
        def gradient(self, draw: Draws) -> tuple[Tensor, Sequence[Tensor]]:
            seen.append(torch.get_num_threads())
            return super().gradient(draw)

    small, large = learners(Watched), learners(Watched, rank=Rank(0, 0, seeded=2**15))
    assert (small[0].threads, large[0].threads) == (1, None)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        after_steps(Eager(small), count=1)
        after_steps(Eager(large), count=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2]


class Odd(nn.Module):
    """Not a chain: something else between its layers."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(x))
        if self.between == "skip":
            y = y + torch.relu(self.b(y))
        elif self.between == "none":
            y = self.b(y)
        elif self.between == "gelu":
            y = nn.functional.gelu(self.b(y))
        else:
            y = torch.relu(self.b(torch.relu(self.b(y))))
        return self.head(y)


@pytest.mark.parametrize("between", ["skip", "none", "gelu", "twice"])
def test_only_chains_are_taken_for_chains(between: str) -> None:
    net = rankup.grow(Odd(between), Rank(2, 1))
    assert net.plan.chain is None
    assert not is_chain(net, Feed(task(0), Recipe(), CPU))


def test_chains_with_other_losses_or_precisions_take_the_general_step() -> None:
    net = rankup.grow(rankup.models.mlp(12, hidden=[10, 8]), Rank(2, 1))
    net.begin_task("open", 3)
    assert net.plan.chain == ("hidden.0", "hidden.1")
    assert is_chain(net, Feed(task(0), Recipe(), CPU))
    assert not is_chain(net, Feed(task(0), Recipe(loss="mse"), CPU))
    assert not is_chain(net, Feed(task(0), Recipe(precision="bfloat16"), CPU))
    kept = rankup.grow(rankup.models.mlp(12, hidden=[10, 8]), Rank(2, 1), base="keep")
    assert not is_chain(kept, Feed(task(0), Recipe(), CPU))


@pytest.mark.parametrize("kind", [RankLearner, ChainLearner])
@pytest.mark.parametrize("rank", RANKS)
def test_rows_of_zeros_change_nothing(kind: type[RankLearner], rank: Rank) -> None:
    recipe = Recipe(batch=8, weight_decay=0.1)
    bare = learners(kind, rank=rank, recipe=recipe)
    padded = learners(kind, rank=rank, recipe=recipe, pad=16)
    assert_agree(after_steps(Eager(bare)), after_steps(Eager(padded)))
    tables = [tensor for name, tensor in padded[0].read().items() if name.endswith((".U", ".V"))]
    assert len(tables) == 4
    assert all(len(table) % 16 == 0 for table in tables)
    for learner in padded:  # the network itself has no rows of zeros
        assert all(len(layer.U) == layer.spec.rank.used(1) for layer in learner._factored.values())


def test_replicas_in_one_tensor_are_the_replicas_alone() -> None:
    """What a captured graph of stacked replicas computes, computed on the CPU."""
    together = learners(ChainLearner, 3)
    first = together[0]
    stacked = {
        name: torch.stack([learner.read()[name] for learner in together]) for name in first.read()
    }
    stacked |= {
        name: torch.stack([learner.learned()[name].detach() for learner in together])
        for name in first.learned()
    }
    draws = [each.draws(torch.Generator().manual_seed(n)) for n, each in enumerate(together)]
    draw = {name: torch.stack([drawn[name][0] for drawn in draws]) for name in draws[0]}
    with first.bound(stacked):
        losses, grads = first.gradient(draw)
    for number, learner in enumerate(together):
        with learner.bound({}):
            loss, alone = learner.gradient({name: entry[number] for name, entry in draw.items()})
        torch.testing.assert_close(losses[number], loss, rtol=1e-12, atol=0)
        for grad, own in zip(grads, alone, strict=True):
            torch.testing.assert_close(grad[number], own, rtol=1e-9, atol=1e-12)


def test_tensors_are_given_back_after_a_step_that_fails() -> None:
    (learner,) = learners(RankLearner, pad=16)
    before = {name: tensor.data_ptr() for name, tensor in learner.named_buffers()}
    with pytest.raises(KeyboardInterrupt), learner.bound(learner.read()):
        raise KeyboardInterrupt
    assert {name: tensor.data_ptr() for name, tensor in learner.named_buffers()} == before


def test_a_flat_tensor_comes_apart_as_it_was_put_together() -> None:
    tensors = {"a": torch.rand(2, 3), "b": torch.rand(()), "c": torch.rand(4)}
    for name, view in views(gathered(tensors.values(), 0), tensors).items():
        assert torch.equal(view, tensors[name])
    stacked = {name: torch.stack([t, t + 1]) for name, t in tensors.items()}
    for name, view in views(gathered(stacked.values(), 1), tensors).items():
        assert torch.equal(view, stacked[name])


def test_rows_are_taken_from_each_replicas_own_table() -> None:
    table, rows = torch.rand(3, 5, 2), torch.tensor([[0, 4], [1, 1], [3, 2]])
    expected = torch.stack([table[n][rows[n]] for n in range(3)])
    assert torch.equal(take(table, rows), expected)
    assert torch.equal(places(rows, 5), rows + torch.tensor([[0], [5], [10]]))


def test_dropout_draws_from_the_seed_and_leaves_torchs_generator_alone() -> None:
    body = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3))
    found = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        net = rankup.grow(body, Rank(2, 1), head="3")
        state = torch.get_rng_state()
        rankup.fit(net, task(0), Recipe(epochs=20, batch=32))
        assert torch.equal(torch.get_rng_state(), state)
        found.append(net.eval()(task(0).test_x, 0))
    assert torch.equal(*found)


class Drawing(nn.Identity):
    seeds: ClassVar[set[int]] = set()

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # in a step
            self.seeds.add(torch.initial_seed())
        return x * 1  # not nothing, or the step written by hand would do


def test_what_modules_draw_differs_by_seed_task_and_epoch() -> None:
    body = nn.Sequential(Drawing(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    for seed in (0, 1):
        net = rankup.grow(body, Rank(2, 1), head="3")
        for index in (0, 1):
            rankup.fit(net, task(index), Recipe(epochs=20, batch=32), seed=seed)
    Drawing.seeds.remove(torch.initial_seed())  # of tracing
    assert len(Drawing.seeds) == 2 * 2 * 20


class Sgd(ModuleLearner):
    """A method with steps of its own: a second backward pass, and a bound on what it learns."""

    def gradient(self, draw: Draws) -> tuple[Tensor, list[Tensor]]:
        loss, first = super().gradient(draw)
        _, second = super().gradient(draw)
        return loss, [(a + b) / 2 for a, b in zip(first, second, strict=True)]

    def settle(self, draw: Draws) -> None:
        with torch.no_grad():
            for parameter in self.body.parameters():
                parameter.clamp_(-0.0625, 0.0625)


def test_a_method_may_bring_steps_of_its_own() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    learner = Sgd(body, Feed(task(0), Recipe(batch=8), CPU), 0)
    losses, _ = after_steps(Eager([learner]))
    assert float(losses[0]) > 0
    assert all(float(p.detach().abs().max()) <= 0.0625 for p in body.parameters())
    assert any(bool((p.detach().abs() == 0.0625).any()) for p in body.parameters())


class Turning(ModuleLearner):
    """Halves its weights before the second epoch."""

    def turn(self, epoch: int) -> None:
        if epoch == 1:
            for parameter in self.body.parameters():
                parameter.mul_(0.5)


def test_what_is_done_before_an_epoch_is_done_to_what_learns() -> None:
    body = nn.Linear(12, 3)
    steps = Eager([Turning(body, Feed(task(0), RECIPE, CPU), 0)])
    steps.turn(0)
    steps.keep()
    before = body.weight.detach().clone()
    steps.turn(1)
    steps.keep()
    assert torch.equal(body.weight, 0.5 * before)


@GPU
def test_captured_learners_may_have_recipes_of_their_own() -> None:
    device = torch.device("cuda")
    recipes = [Recipe(batch=8), Recipe(batch=8, optimiser="sgd"), Recipe(batch=8, weight_decay=0.5)]
    found = []
    for captured in (False, True):
        pupils = [learners(RankLearner, recipe=each, device=device)[0] for each in recipes]
        steps = Graph("branches", pupils, None) if captured else Eager(pupils)
        if captured:
            steps.start(pupils)
        draws = [each.draws(torch.Generator(device).manual_seed(0)) for each in pupils]
        rates = [[RATE * (number + 1)] * pupils[0].feed.steps for number in range(3)]
        losses = steps.epoch(draws, rates, 0)
        steps.keep()
        flat = [torch.cat([p.detach().flatten() for p in e.parameters()]) for e in pupils]
        found.append((losses, flat))
    assert_agree(*found)
    assert not torch.allclose(found[0][1][0], found[0][1][2])


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
def test_captured_replicas_agree_with_the_seed_alone(
    kind: type[RankLearner], form: str, rank: Rank
) -> None:
    device = torch.device("cuda")
    recipe = Recipe(batch=4, weight_decay=0.1)
    alone = Eager(learners(RankLearner, 3, rank=rank, recipe=recipe, device=device))
    pupils = learners(kind, 3, rank=rank, recipe=recipe, device=device, pad=16)
    graph = Graph(form, pupils, None)
    graph.start(pupils)
    assert pupils[0].feed.steps == 24
    draws = [each.draws(torch.Generator(device).manual_seed(n)) for n, each in enumerate(pupils)]
    found = []
    for steps in (alone, graph):
        losses = steps.epoch(draws, [[RATE] * 20 + [0.0] * 4] * len(draws), 0)
        steps.keep()
        flat = [torch.cat([p.detach().flatten() for p in e.parameters()]) for e in steps.learners]
        found.append((losses, flat))
    assert_agree(*found)


@GPU
def test_captured_convolutions_agree_with_the_seed_alone() -> None:
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
        draws = [p.draws(torch.Generator(device).manual_seed(n)) for n, p in enumerate(pupils)]
        rates = [RATE] * 10 + [0.0] * (pupils[0].feed.steps - 10)
        losses = steps.epoch(draws, [rates] * len(draws), 0)
        steps.keep()
        flat = [torch.cat([p.detach().flatten() for p in e.parameters()]) for e in pupils]
        found.append((losses, flat))
    torch.testing.assert_close(found[0][0].double(), found[1][0].double(), rtol=1e-5, atol=0)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


@GPU
def test_one_graph_serves_tasks_of_different_rank_and_what_it_learns_is_kept() -> None:
    device = torch.device("cuda")
    net = rankup.grow(rankup.models.mlp(12, hidden=[10, 8]), Rank(2, 1)).to(device)
    engine = Engine()
    graphs = set()
    from rankup.train import NetPupil, learn

    pupil = NetPupil(net, Recipe(epochs=15, batch=32), 0)
    for seed in range(4):
        (failure,) = learn([pupil], [task(seed, samples=192)], engine)
        assert failure is None
        graphs.add(engine._graph)
        own = task(seed, samples=192).to(device)
        assert float((net(own.train_x, seed).argmax(1) == own.train_y).float().mean()) > 0.9
    assert len(graphs) == 2  # the first task is of another rank, all later ones share a graph


@GPU
def test_a_module_that_cannot_be_captured_runs_step_by_step_and_it_is_said() -> None:
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


@GPU
@pytest.mark.parametrize("net", ["mlp", "resnet18"])
def test_the_same_seed_gives_the_same_numbers_twice(net: str) -> None:
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


def test_a_captured_graph_serves_no_other_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    class Captured:
        def __init__(self, form: str, learners: object, signature: object) -> None:
            self.signature = signature

        def start(self, learners: object) -> None: ...

    monkeypatch.setattr("rankup.engine.Graph", Captured)
    monkeypatch.setattr(Engine, "_form", lambda self, learners: "branches")
    (learner,) = learners(RankLearner)
    engine = Engine()
    first = engine.start([learner])
    assert engine.start([learner]) is first
    learner.feed.recipe = replace(RECIPE, weight_decay=0.5)
    assert engine.start([learner]) is not first


@pytest.mark.parametrize("working", [["branches"], []])
def test_what_cannot_be_captured_falls_back_a_gear_at_a_time_and_it_is_said_once(
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
    monkeypatch.setattr("rankup.engine.Graph", Captured)
    monkeypatch.setattr(Engine, "_form", lambda self, learners: "vmap")
    engine = Engine(said.append)
    for _ in range(2):
        steps = engine.start([learner])
        assert isinstance(steps, Captured if working else Eager)
    assert tried == ["vmap", "branches"]
    assert said[0] == "steps are taken side by side, as they cannot be captured: no vmap"
    assert len(said) == (1 if working else 2)
