"""What two processes do with one network, and one process with the same data."""

import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import Tensor, nn

import rankup
from rankup.data import make_stream
from rankup.distributed import sharding

RANK = rankup.Rank(first=3, step=1, seeded=4)
SAMPLES = 24


class Small(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.hidden = nn.Linear(256, 16)
        self.norm1 = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x.view(-1, 1, 8, 8))).relu().flatten(1)
        return self.head(self.norm1(self.hidden(x)).relu())


def small(norm: bool, dtype: torch.dtype = torch.float64, **options: Any) -> rankup.IncrementalNet:
    torch.manual_seed(0)
    return rankup.grow(Small(norm).to(dtype), RANK, **options)


def data(seed: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, 64, generator=generator, dtype=dtype)
    return x, torch.randint(10, (SAMPLES,), generator=generator)


def mine(x: Tensor, rank: int | None) -> Tensor:
    """A rank's half, or all of it in one process."""
    return x if rank is None else x.chunk(2)[rank]


def gradients(rank: int | None, norm: bool) -> dict[str, Tensor]:
    net = small(norm).distribute()
    net.begin_task("a", 10)
    x, y = data()
    F.cross_entropy(net(mine(x, rank), 0), mine(y, rank)).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def plain_gradients(rank: int | None = None) -> dict[str, Tensor]:
    return gradients(rank, norm=False)


def norm_gradients(rank: int | None = None) -> dict[str, Tensor]:
    return gradients(rank, norm=True)


def own_loop(rank: int | None = None, **options: Any) -> dict[str, Tensor]:
    """Two tasks by a loop of one's own; batch norms are calibrated on each rank's own samples."""
    net = small(True, **options).distribute()
    for number, task in enumerate(("a", "b")):
        net.begin_task(task, 10)
        x, y = data(number)
        optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(4):
            optimiser.zero_grad()
            F.cross_entropy(net(mine(x, rank), number), mine(y, rank)).backward()
            optimiser.step()
        net.commit_task(calibrate=x.chunk(2) if rank is None else [mine(x, rank)])
    return dict(net.state_dict())


def own_loop_int8(rank: int | None = None) -> dict[str, Tensor]:
    return own_loop(rank, store="int8")


def stale_wrapper(rank: int) -> list[Tensor]:
    """Torch's wrapper, made for the first task and used for the second."""
    net = small(False).distribute()
    net.begin_task("a", 10)
    wrapper = nn.parallel.DistributedDataParallel(net)
    net.commit_task()
    net.begin_task("b", 10)
    x, y = data()
    F.cross_entropy(wrapper(mine(x, rank), 1), mine(y, rank)).backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def without_deciding(_: int) -> None:
    small(False).begin_task("a", 10)


def each_its_own(rank: int) -> Tensor:
    net = small(False).distribute(False)
    net.begin_task("a", 10)
    x, y = data()
    F.cross_entropy(net(mine(x, rank), 0), mine(y, rank)).backward()
    net.commit_task()
    return next(iter(net.state_dict().values()))


def fully_sharded(_: int) -> None:
    net = small(False).distribute()
    net.begin_task("a", 10)
    torch.distributed.fsdp.fully_shard(net)


def different_steps(rank: int) -> None:
    net = small(False).distribute()
    net.begin_task("a", 10)
    with torch.no_grad():
        next(iter(net.parameters())).add_(rank)
    net.commit_task()


def different_networks(rank: int) -> None:
    small(False, seed=rank).distribute().begin_task("a", 10)


def gradients_of_some(rank: int) -> None:
    net = small(False).distribute()
    net.begin_task("a", 10)
    x, y = data()
    parameters = list(net.parameters())
    loss = F.cross_entropy(net(mine(x, rank), 0), mine(y, rank))
    loss.backward(inputs=parameters if rank else parameters[1:])


def batches_of_one_fail(rank: int) -> None:
    net = small(True).distribute()
    net.begin_task("a", 10)
    x, _ = data()
    net.commit_task(calibrate=[x[:, :1] if rank else x])


def fit_two(rank: int | None = None, store: Any = "full", batch: int = 64) -> Any:
    net = small(True, torch.float32, store=store)
    recipe = rankup.Recipe(epochs=3, batch=batch, lr=0.01)
    stream = make_stream("s-digits", tasks=2)
    for task in stream:
        rankup.fit(net, replace(task), recipe)
    x = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    logits = torch.stack([net.eval()(x, task) for task in range(2)])
    return dict(net.state_dict()), logits.detach()


def fit_uneven(rank: int | None = None) -> Any:
    return fit_two(rank, batch=65)


def fit_int8(rank: int | None = None) -> Any:
    return fit_two(rank, store="int8")


def fit_pruned(rank: int | None = None) -> Any:
    state, _ = fit_chain(rank, replace(RANK, seeded=64, prune=True))
    return state


def fit_chain(rank: int | None = None, rule: rankup.Rank = RANK) -> Any:
    net = rankup.grow(rankup.models.mlp(64, hidden=[32, 32]), rule)
    for task in make_stream("s-digits", tasks=2):
        rankup.fit(net, task, rankup.Recipe(epochs=3, batch=64))
    x = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return dict(net.state_dict()), torch.stack([net(x, task) for task in range(2)])


def fit_diverges(rank: int) -> None:
    net = rankup.grow(rankup.models.mlp(64, hidden=[32, 32]), RANK)
    task = make_stream("s-digits", tasks=2)[0]
    try:
        rankup.fit(net, task, rankup.Recipe(epochs=2, batch=64, lr=1e9))
    finally:
        assert net.tasks == []
        assert net.learning is None


class Deep(nn.Module):
    """Pretrained, with twelve equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)


def sharded(rank: int | None = None) -> Any:
    """Two tasks on a divided base, saved, loaded and divided again; and the largest share of the
    base that was in memory at once."""
    torch.manual_seed(0)
    net = rankup.grow(Deep(), rankup.Rank(first=2, step=1), base="keep")
    weights = [layer.get_buffer("base_weight") for layer in net.layers[:-1]]
    total = sum(weight.numel() for weight in weights)
    net.distribute(shard=True)
    held = sum(
        getattr(weight, "to_local", lambda weight=weight: weight)().numel()
        for weight in (layer.get_buffer("base_weight") for layer in net.layers[:-1])
    )
    live, peak = 0, 0

    def ended(numbers: int) -> None:
        nonlocal live
        live -= numbers

    gather = sharding.whole

    def counted(part: Tensor) -> Tensor:
        nonlocal live, peak
        if gather(part) is part:
            return part
        # An array's end is that of the memory: tensors have it in common with others.
        array = gather(part).numpy().copy()
        live += array.size
        peak = max(peak, live)
        weakref.finalize(array, ended, array.size)
        return torch.from_numpy(array)

    sharding.whole = counted
    for number, task in enumerate(make_stream("s-digits", tasks=2)):
        if number == 0:
            rankup.fit(net, task, rankup.Recipe(epochs=6, batch=64, lr=0.003))
            continue
        net.begin_task(task.name, task.classes)
        optimiser = torch.optim.SGD(net.parameters(), lr=0.01)
        x, y = task.train_x[:64].flatten(1).float() / 16, task.train_y[:64]
        for _ in range(3):
            optimiser.zero_grad()
            F.cross_entropy(net(mine(x, rank), number), mine(y, rank)).backward()
            optimiser.step()
        net.commit_task()
    sharding.whole = gather
    folder = Path() if rank is None else Path(sys.argv[1]) / "net"  # of both processes
    x = torch.rand(8, 64, generator=torch.Generator().manual_seed(0))
    logits = torch.stack([net.eval()(x, task) for task in range(2)])
    mixed = net(x, torch.tensor([0, 1] * 4))
    with net.gathered():
        if rank == 0:
            rankup.save(net, folder)
    if rank is not None:
        torch.distributed.barrier()
        loaded = rankup.load(folder, Deep())
        loaded.distribute(shard=True)
        again = torch.stack([loaded.eval()(x, task) for task in range(2)])
        assert torch.equal(again, logits)
    return logits.detach(), mixed.detach(), (held + peak) / total
