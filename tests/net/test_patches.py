"""Features of natural images that a router sees: exact everywhere, and the same for ever."""

import hashlib
import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankup
from rankup.growing.routing import RouterRule
from rankup.net.routers import patches
from rankup.net.routers.base import Examples
from rankup.net.routers.patches import patch_features
from rankup.net.routers.routing import Routing

ROUTER = "analytic, patches, features=60"
FEATURES = 70  # that many are what 60 come to: a filter of each size everywhere, and colours


def images(count: int, side: int = 32, channels: int = 3, seed: int = 0) -> Tensor:
    """Smooth ones, with colours and edges."""
    drawn = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, channels, 5, 5, generator=drawn)
    shown = F.interpolate(coarse, side, mode="bilinear")
    return (shown.mul(255).round() / 255).float()


def whole_image() -> Tensor:
    """Bytes by integer arithmetic alone, for the digest."""
    places = torch.arange(3 * 32 * 32).view(1, 3, 32, 32)
    return ((places * places // 97 + places * 31) % 256).float() / 255


def test_features_are_those_of_saved_folders_for_ever() -> None:
    found = patch_features(whole_image(), 60, 3).to(torch.int8)
    assert found.shape == (1, FEATURES)
    digest = hashlib.sha256(found.numpy().tobytes()).hexdigest()
    assert digest[:16] == "4a4c1c644121b5fb"


def test_features_do_not_depend_on_batches_memory_formats_or_number_types() -> None:
    x = images(7)
    found = patch_features(x, 60, 0)
    assert torch.equal(found, found.round())
    assert found.abs().max() <= 127
    assert found.max() - found.min() > 20
    assert torch.equal(torch.cat([patch_features(row, 60, 0) for row in x.split(3)]), found)
    laid = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(patch_features(laid, 60, 0), found)
    assert torch.equal(patch_features(x.double(), 60, 0), found)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(patch_features(x, 60, 0), found)


def test_features_are_exact_however_sums_and_roots_are_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on other devices: operands of TF32, sums in another order, roots off by a last bit."""
    x, root, convolve = images(9), Tensor.sqrt, F.conv2d
    found, contrast = patch_features(x, 200, 0), patches._contrast(x.mul(255).round(), 6)

    def cut(tensor: Tensor) -> Tensor:
        return (tensor.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32).flip(1)

    monkeypatch.setattr(F, "conv2d", lambda x, w, **given: convolve(cut(x), cut(w), **given))
    monkeypatch.setattr(Tensor, "sqrt", lambda x: root(x).nextafter(torch.zeros_like(x)))
    assert torch.equal(patch_features(x, 200, 0), found)
    assert torch.equal(patches._contrast(x.mul(255).round(), 6), contrast)


@pytest.mark.gpu
@pytest.mark.parametrize("side", [32, 70, 100])
def test_gpu_finds_the_same_whole_numbers(side: int) -> None:
    x = images(70, side)
    found = patch_features(x.cuda(), 1200, 0).cpu()
    assert torch.equal(found, patch_features(x, 1200, 0))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_filters_are_whole_numbers_whose_sums_float32_holds(channels: int) -> None:
    for size in (3, 5, 8):
        bank = torch.from_numpy(patches._filters(40, channels, size, 0))
        assert torch.equal(bank, bank.round())
        assert torch.equal(bank.sum((1, 2, 3)), torch.zeros(40))
        assert bank.abs().max() <= 256  # TF32 and bfloat16 hold them
        assert 255 * bank.abs().sum((1, 2, 3)).max() < 2**24
        assert bank.flatten(1).unique(dim=0).shape[0] == 40


def test_image_and_its_mirror_image_are_alike_and_others_are_not() -> None:
    x = images(5)
    found = patch_features(x, 200, 0)
    assert torch.equal(patch_features(x.flip(3), 200, 0), found)
    assert not torch.equal(patch_features(x.flip(2), 200, 0), found)
    assert not torch.equal(patch_features(x, 200, 1), found)
    assert found.unique(dim=0).shape[0] == 5


def test_brightness_and_contrast_do_not_matter_and_flat_images_have_no_features() -> None:
    x = images(5)
    assert torch.equal(patch_features(x * 4 - 2, 60, 0), patch_features(x, 60, 0))
    flat = patch_features(torch.full((2, 3, 32, 32), 0.3), 60, 0)
    assert torch.equal(flat, torch.full_like(flat, -127))


@pytest.mark.parametrize("shape", [(1, 24, 24), (3, 32, 48), (3, 84, 84), (4, 33, 24)])
def test_images_of_other_sizes_have_as_many_features(shape: tuple[int, ...]) -> None:
    x = images(2, 96, shape[0])[:, :, : shape[1], : shape[2]]
    assert patch_features(x, 60, 0).shape == patch_features(images(2, 32, shape[0]), 60, 0).shape


def tasks() -> list[rankup.data.Task]:
    made = []
    for number in range(3):
        x = images(24, seed=number)
        x[::2] = x[::2].flip(2)
        y = torch.arange(24) % 2
        made.append(rankup.data.Task(f"task{number}", 2, x, y, x[:6], y[:6]))
    return made


def grown(router: str) -> rankup.IncrementalNet:
    module = rankup.models.mlp(3 * 32 * 32, hidden=[4])
    return rankup.grow(module, rankup.Rank(1, 1), router=router)


def taught(order: tuple[int, ...] = (0, 1, 2), batch: int = 8) -> rankup.IncrementalNet:
    net, known = grown(ROUTER), tasks()
    for index in order:
        x, y = known[index].train_x, known[index].train_y
        parts = [(*pair, {}) for pair in zip(x.split(batch), y.split(batch), strict=True)]
        net.begin_task(known[index].name, classes=2)
        net.commit_task(examples=Examples(parts.copy, parts.copy))
    return net.eval()


def routing(net: rankup.IncrementalNet) -> Routing:
    assert net.routing is not None
    return net.routing


def test_sums_and_discriminants_do_not_depend_on_the_order_of_tasks_or_batches() -> None:
    first = taught()
    total = routing(first).total
    assert total is not None
    assert total.gram.shape == (FEATURES, FEATURES)
    for order, batch in zip(itertools.permutations(range(3)), (8, 5, 3, 2, 7, 4), strict=True):
        net = taught(order, batch)
        other = routing(net).total
        assert other is not None
        assert torch.equal(other.gram, total.gram)
        named = {row.name: row.tensors for row in routing(net).rows}
        for row in routing(first).rows:
            for key in ("analytic.sums", "analytic.counts"):
                assert torch.equal(row.tensors[key], named[row.name][key])
        found, expected = routing(net)._solve(), routing(first)._solve()
        columns = torch.cat([torch.arange(6).view(3, 2)[order.index(task)] for task in range(3)])
        assert torch.equal(found.maps[:, columns], expected.maps)


def test_saved_network_guesses_with_the_same_bits(tmp_path: Path) -> None:
    net, x = taught(), images(9)
    rankup.save(net, tmp_path / "net")
    manifest = (tmp_path / "net" / "manifest.json").read_text()
    assert 'analytic=1,features=60,patches"' in manifest
    loaded = rankup.load(tmp_path / "net")
    assert loaded.router == net.router
    assert torch.equal(loaded(x).logits, net(x).logits)


def test_rules_without_patches_are_written_as_before() -> None:
    assert str(RouterRule.parse("analytic, features=48, apart")) == "analytic=1,features=48,apart"
    both = RouterRule.parse("analytic, patches, apart")
    assert str(both) == "analytic=1,features=1024,apart,patches"
    assert RouterRule.parse(str(both)) == both


@pytest.mark.parametrize("shape", [(12,), (3, 16, 16), (3, 32, 23), (5, 32, 32)])
def test_inputs_that_are_no_images_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(rankup.RankupError, match="of at least 24×24 pixels and at most 4 channels"):
        patch_features(torch.rand(2, *shape), 60, 0)


def test_task_without_images_is_refused_before_it_is_learned() -> None:
    net = rankup.grow(rankup.models.mlp(64, hidden=[4]), rankup.Rank(1, 1), router=ROUTER)
    seen: list[int] = []
    x, y = torch.rand(40, 1, 8, 8), torch.arange(40) % 2
    with pytest.raises(rankup.RankupError, match=r"got inputs of shape \[1, 8, 8\]"):
        rankup.fit(
            net, rankup.data.Task("small", 2, x, y, x, y), on_epoch=lambda *_: seen.append(1)
        )
    assert not seen
    assert net.tasks == []
    assert net.learning is None


def test_kept_base_refuses_patches() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(rankup.RankupError, match="with base='keep' a router compares the base's"):
        rankup.grow(module, rankup.Rank(1, 1), base="keep", router=ROUTER)


@pytest.mark.parametrize(
    ("router", "message"),
    [
        ("analytic, patches=3", "patches takes no value, got '3'"),
        ("energy, patches", "patches is an option of the analytic router"),
    ],
)
def test_refused_rules(router: str, message: str) -> None:
    with pytest.raises(rankup.RankupError, match=message):
        RouterRule.parse(router)


def test_colours_are_told_by_their_means_and_spreads() -> None:
    x = images(3)
    x[1], x[2] = x[0].flip(0), x[0].flip(1)  # its colours exchanged, and the image upside down
    pixels = patches._levels(x)
    means, spreads = patches._colours(pixels).view(3, 2, 3, 4, 2).unbind(1)
    assert torch.equal(means[1], means[0].flip(0))
    assert torch.equal(spreads[2], spreads[0].flip(1))
    sides = torch.stack([pixels[0, 0, :8, :8], pixels[0, 0, :8, 24:]])
    assert means[0, 0, 0, 0] == int(sides.mean())
    spread = sides.var((1, 2), correction=0).mean().sqrt()
    assert abs(spreads[0, 0, 0, 0] - 2 * spread) < 0.51
