"""A grown network learns task after task, and no committed task ever changes."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, IterableDataset

import rankup
from helpers.sampling import sampled
from helpers.zoo import (
    KINDS,
    RANKS,
    Transformer,
    assert_same_bits,
    inputs,
    logits,
    module,
    relative_error,
    taught,
    teach,
)
from rankup.layers import FactoredLayer, TaskNorm
from rankup.rank import Rank


def per_task_loop(net: rankup.IncrementalNet, x: Tensor, ids: Tensor) -> Tensor:
    """A mixed batch the slow way; missing classes are −inf."""
    widest = max(net.classes.values())
    rows = []
    for sample, task in zip(x, ids.tolist(), strict=True):
        answer = net(sample[None], task=task)[0]
        rows.append(nn.functional.pad(answer, (0, widest - len(answer)), value=-torch.inf))
    return torch.stack(rows)


@pytest.mark.parametrize(("kind", "rank", "base"), sampled(KINDS, [*RANKS], ["new", "keep"]))
def test_committed_logits_keep_their_bits(
    kind: str, rank: str, base: str, tmp_path: object
) -> None:
    net = taught(kind, rank=RANKS[rank], base=base)
    x = inputs(kind, batch=9, seed=99)
    before = logits(net, x)
    for index in range(6):
        teach(net.train(), f"later {index}", inputs(kind, seed=index), classes=2 + index, steps=2)
        assert_same_bits(before, logits(net.eval(), x))
    before = logits(net, x)
    with pytest.raises(rankup.RankupError, match=r"stays in torch.float32, as torch.float64 would"):
        net.to(torch.float64)
    assert_same_bits(before, logits(net, x))
    assert_same_bits(before, logits(copy.deepcopy(net), x))
    rankup.save(net, tmp_path / "net")
    assert_same_bits(before, logits(rankup.load(tmp_path / "net", module(kind)).eval(), x))


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 40), min_size=2, max_size=4),
    first=st.integers(1, 2),
    step=st.integers(0, 2),
    seeded=st.sampled_from([0, 3, "2x"]),
    classes=st.lists(st.integers(2, 7), min_size=2, max_size=6),
    batch=st.integers(1, 33),
    seed=st.integers(0, 5),
)
def test_any_mlp_keeps_its_bits_and_runs_mixed_batches(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    first: int,
    step: int,
    seeded: int | str,
    classes: list[int],
    batch: int,
    seed: int,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, sizes[0], generator=draw)
    net = rankup.grow(
        rankup.models.mlp(sizes[0], hidden=sizes[1:]), Rank(first, step, seeded), seed=seed
    )
    before: list[Tensor] = []
    for task, count in enumerate(classes):
        teach(net, f"{task}", x, count, steps=1, selectors="previous")
        assert_same_bits(before, logits(net, x))
        before = logits(net, x)
    folder = tmp_path_factory.mktemp("net")
    rankup.save(net, folder)
    assert rankup.verify(folder)
    assert_same_bits(before, logits(rankup.load(folder), x))
    ids = torch.randint(len(classes), (batch,), generator=draw)
    mixed, loop = net(x, task=ids), per_task_loop(net, x, ids)
    assert torch.equal(mixed.isinf(), loop.isinf())
    there = ~loop.isinf()
    assert float((mixed - loop)[there].abs().max()) <= 1e-5 * (1 + float(loop[there].abs().max()))


@pytest.mark.parametrize(("kind", "rank", "base"), sampled(KINDS, [*RANKS], ["new", "keep"]))
def test_mixed_batch_equals_per_task_loop(kind: str, rank: str, base: str) -> None:
    for dtype in (torch.float64, torch.float32):
        net = taught(kind, tasks=(3, 2, 5), rank=RANKS[rank], base=base, dtype=dtype)
        x = inputs(kind, batch=8, seed=7, dtype=dtype)
        ids = torch.tensor([2, 0, 1, 1, 2, 0, 0, 2])
        mixed, loop = net(x, task=ids), per_task_loop(net, x, ids)
        assert torch.equal(mixed.isinf(), loop.isinf())
        assert mixed.shape == (8, 5)
        assert loop.isinf().sum() == 2 * 3 + 3 * 2  # classes that task 1 and task 0 do not have
        there = ~loop.isinf()
        if dtype == torch.float64:
            assert relative_error(mixed[there], loop[there]) < 1e-12
        worst = float((mixed - loop)[there].abs().max())
        assert worst <= 1e-5 * (1 + float(loop[there].abs().max()))


def test_mixed_batch_with_head_per_position() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.Linear(5, 6)
            self.head = nn.Linear(6, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.hidden(x).relu())

    net = rankup.grow(Tagger().double(), Rank(2, 1))
    for classes in (2, 4):
        net.begin_task(f"{classes}", classes)
        net.commit_task()
    x = torch.randn(3, 7, 5, dtype=torch.float64)
    mixed = net(x, task=torch.tensor([1, 0, 1]))
    assert mixed.shape == (3, 7, 4)
    assert relative_error(mixed[0], net(x, task=1)[0]) < 1e-12
    assert relative_error(mixed[1, :, :2], net(x, task=0)[1]) < 1e-12
    assert bool(mixed[1, :, 2:].isinf().all())


def test_trainable_is_exactly_parameters() -> None:
    net = rankup.grow(module("resnet18"), Rank(2, 1, seeded=3))
    x = inputs("resnet18")
    for task in range(3):
        assert list(net.parameters()) == []
        assert not any(buffer.requires_grad for buffer in net.buffers())
        net.begin_task(f"{task}", 3)
        names = [name.rpartition(".")[2] for name, _ in net.named_parameters()]
        layers = sum(isinstance(part, FactoredLayer) for part in net.modules())
        norms = sum(isinstance(part, TaskNorm) for part in net.modules())
        assert names.count("new_U") == names.count("new_V") == names.count("new_selector") == layers
        assert names.count("new_weight") == names.count("new_bias") == norms + 1
        net(x, task=task).sum().backward()
        assert all(parameter.grad is not None for parameter in net.parameters())
        net.commit_task([x])
    assert list(net.parameters()) == []


@pytest.mark.parametrize("rank", RANKS.values(), ids=RANKS)
def test_seed_determines_the_network(rank: Rank) -> None:
    x = inputs("convolutions")
    one, same = (taught("convolutions", seed=3, rank=rank) for _ in range(2))
    assert_same_bits(logits(one, x), logits(same, x))
    other = taught("convolutions", seed=4, rank=rank)
    assert not torch.equal(logits(one, x)[0], logits(other, x)[0])


def test_torch_generator_is_left_alone() -> None:
    given = module("convolutions")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    net = rankup.grow(given, Rank(2, 1), exclude="3")
    teach(net, "a", inputs("convolutions"))
    net(inputs("convolutions"), task=torch.zeros(6, dtype=torch.long))
    assert torch.equal(torch.rand(3), expected)


def test_abandoning_task_leaves_network_as_it_was() -> None:
    given = Transformer()
    x = inputs("transformer")
    net = rankup.grow(given, Rank(2, 1), exclude="mlp.0")
    state = copy.deepcopy(net.state_dict())
    for committed in range(2):
        teach(net, "tried", x, commit=False)
        net.abandon_task()
        assert net.learning is None
        assert list(net.parameters()) == []
        assert net.state_dict().keys() == state.keys()
        assert all(torch.equal(state[key], value) for key, value in net.state_dict().items())
        teach(net, f"{committed}", x)
        state = copy.deepcopy(net.state_dict())
    fresh = rankup.grow(given, Rank(2, 1), exclude="mlp.0")
    for committed in range(2):
        teach(fresh, f"{committed}", x)
    assert_same_bits(logits(net, x), logits(fresh, x))


def test_past_full_rank_network_keeps_learning() -> None:
    net = rankup.grow(rankup.models.mlp(16, hidden=[16]), Rank(first=1, step=1))
    x = torch.randn(11, 16, generator=torch.Generator().manual_seed(0))
    answers: list[Tensor] = []
    for task in range(300):
        teach(net, f"{task}", x, classes=2, steps=1)
        answers.append(net(x, task=task))
    assert net.body.hidden[0].U.shape == (300, 16)
    assert_same_bits(answers, logits(net, x))
    # The last task learned something: its logits are not those it started with.
    fresh = net.merged(299)
    net.begin_task("more", 2)
    assert not torch.equal(net(x, task="more"), fresh(x))


def test_calibration_runs_in_eval_mode() -> None:
    given = nn.Sequential(
        nn.Dropout(0.9), nn.Linear(9, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)
    )
    net = rankup.grow(given, Rank(2, 1)).train()
    net.body[0].eval()
    x = inputs("mlp", batch=32)
    teach(net, "a", x)
    assert net.training
    assert net.body[1].training
    assert not net.body[0].training
    net.eval()
    hidden = net.merged("a")[1](x)
    torch.testing.assert_close(net.body[2].means[0], hidden.mean(0))


class Streamed(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(inputs("mlp", batch=32))


@pytest.mark.parametrize("norms", [True, False])
def test_calibration_takes_iterators(norms: bool) -> None:
    layers = [nn.Linear(9, 8), nn.BatchNorm1d(8)] if norms else [nn.Linear(9, 8)]
    given = nn.Sequential(*layers, nn.ReLU(), nn.Linear(8, 2))
    answers = []
    for batches in (inputs("mlp", batch=32).split(8), DataLoader(Streamed(), batch_size=8)):
        net = rankup.grow(given, Rank(2, 1))
        net.begin_task("a", 2)
        net.commit_task(calibrate=batches)
        answers.append(net.eval()(inputs("mlp"), "a"))
    assert torch.equal(*answers)


def test_options_reach_module() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(9, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.head(self.hidden(x).relu()) * scale

    net = rankup.grow(Scaled(), Rank(2, 1))
    x = inputs("mlp")
    teach(net, "a", x)
    assert torch.equal(net(x, task="a", scale=2.0), 2 * net(x, task="a"))


def test_tasks_are_named_counted_and_found_by_any_index() -> None:
    net = taught("mlp")
    x = inputs("mlp")
    assert net.tasks == ["task 0", "task 1", "task 2"]
    assert net.classes == {"task 0": 3, "task 1": 2, "task 2": 4}
    by_name = net(x, task="task 1")
    assert torch.equal(by_name, net(x, 1))
    assert torch.equal(by_name, net(x, task=torch.tensor(1)))
    teach(net, "fourth", x, commit=False)
    assert net.learning == "fourth"
    assert torch.equal(net(x, task="fourth"), net(x, task=3))
    assert net.tasks == ["task 0", "task 1", "task 2"]


def test_every_task_and_layer_starts_with_draws_of_its_own() -> None:
    net = rankup.grow(rankup.models.mlp(8, hidden=[8, 8]), Rank(first=1, step=1, seeded=4))
    starts: list[Tensor] = []
    for task in range(3):
        net.begin_task(f"{task}", 3)
        for layer in net.body.hidden:
            starts += [layer.new_U.detach().clone(), layer.new_V.detach().clone()]
            starts.append(layer.new_selector.detach()[:4].clone())
        starts.append(net.body.head.new_weight.detach().clone())
        net.commit_task()
    alike = [
        (i, j)
        for i in range(len(starts))
        for j in range(i)
        if starts[i].shape == starts[j].shape and torch.equal(starts[i], starts[j])
    ]
    assert not alike


def test_shared_tensors_start_from_network_seed() -> None:
    def start(seed: int, network_seed: int) -> Tensor:
        torch.manual_seed(seed)
        given = rankup.models.mlp(8, hidden=[8, 8])
        return rankup.grow(given, Rank(2, 1), last=1, seed=network_seed).body.hidden[0].weight

    assert torch.equal(start(1, 0), start(2, 0))
    assert not torch.equal(start(1, 0), start(1, 1))


def test_commit_out_of_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    net = taught("mlp")
    x = inputs("mlp")
    before = logits(net, x)
    teach(net, "open", x, commit=False)
    learning = net(x, task="open")

    def fails(*added: object, **selections: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(net.body.head, "extended", fails)
        with pytest.raises(MemoryError):
            net.commit_task()
    assert net.tasks == ["task 0", "task 1", "task 2"]
    assert_same_bits(before, logits(net, x))
    assert torch.equal(net(x, task="open"), learning)
    net.commit_task()
    assert net.tasks[-1] == "open"


def exchanged(net: rankup.IncrementalNet) -> None:
    net.body.hidden[0].new_U = nn.Parameter(torch.randn(3, 16))


def pruned(net: rankup.IncrementalNet) -> None:
    prune.l1_unstructured(net.body.hidden[0], "new_V", 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (exchanged, r"hidden\.0\.U is \[3, 16\], not \[1, 16\] as at its start"),
        (pruned, r"hidden\.0\.V is missing, not \[1, 12\] as at its start, as happens after"),
    ],
)
def test_only_what_task_began_with_is_committed(
    change: Callable[[rankup.IncrementalNet], None], message: str
) -> None:
    net = rankup.grow(rankup.models.mlp(12, hidden=[16]), Rank(2, 1))
    net.begin_task("a", 2)
    net.commit_task()
    before = logits(net, torch.ones(3, 12))
    net.begin_task("b", 2)
    change(net)
    with pytest.raises(rankup.TaskStateError, match=message):
        net.commit_task()
    if change is pruned:
        prune.remove(net.body.hidden[0], "new_V")
    net.abandon_task()
    assert_same_bits(before, logits(net, torch.ones(3, 12)))


@pytest.mark.parametrize("wrap", [lambda net: net, nn.Sequential], ids=["itself", "inside another"])
def test_load_state_dict_not_strict(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    net, other = taught("mlp"), taught("mlp", seed=1)
    state = wrap(other).state_dict()
    missing = next(iter(state))
    del state[missing]
    assert wrap(net).load_state_dict(state, strict=False).missing_keys == [missing]
    own, given = wrap(net).state_dict(), wrap(other).state_dict()
    assert [name for name in own if not torch.equal(own[name], given[name])] == [missing]
