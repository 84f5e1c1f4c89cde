"""A-GEM: no step goes against the gradient of a memory batch."""

import pytest
import torch
from torch import Tensor

import rankup
from helpers.little import after, cross_entropies, entry, gradient, little_stream, make
from rankup.methods.agem import projected

SHAPES = [(40, 30), (40,), (7, 40), ()]


def random(seed: int, scale: float = 1.0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=draw) for shape in SHAPES]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def wanted(own: Tensor, other: Tensor) -> Tensor:
    """The projection as the paper writes it."""
    along = own @ other
    return own - along / (other @ other) * other if along < 0 else own


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_harmful_gradient_is_projected(scale: float) -> None:
    harmful = 0
    for seed in range(40):
        reference, grads = random(seed, scale), random(seed + 100)
        if seed % 4 == 0:  # nearly all of the gradient has to go
            grads = [g / 1000 - r / scale for g, r in zip(grads, reference, strict=True)]
        found, own, other = flat(projected(grads, reference)), flat(grads), flat(reference)
        assert found @ other >= -1e-6 * own.norm() * other.norm()
        torch.testing.assert_close(found, wanted(own, other), rtol=1e-5, atol=1e-6)
        harmful += int(own @ other < 0)
    assert 15 < harmful < 40


def test_a_harmless_gradient_stays_as_it_is_bit_for_bit() -> None:
    harmless = 0
    for seed in range(40):
        reference, grads = random(seed), random(seed + 100)
        if flat(grads) @ flat(reference) >= 0:
            harmless += 1
            for found, own in zip(projected(grads, reference), grads, strict=True):
                assert torch.equal(found, own)
    assert harmless > 10


def test_an_empty_reference_changes_nothing() -> None:
    nothing = [torch.zeros(shape) for shape in SHAPES]
    for found, own in zip(projected(random(0), nothing), random(0), strict=True):
        assert torch.equal(found, own)


def test_a_step_projects_by_a_second_batch_from_the_memory() -> None:
    """Against plain code: two gradients over all weights and heads, each sample by its own head."""
    stream = little_stream()
    learner = after(make("agem", stream, options={"replay": 8}), stream, 2)
    harmful = []
    for seed in range(8):
        draw = entry(learner, seed=seed)
        weights = list(learner.body.parameters())
        batches = [learner.current(draw), learner.replayed(draw)]
        losses = [cross_entropies(learner, *batch).mean() for batch in batches]
        own, other = (flat(list(torch.autograd.grad(loss, weights))) for loss in losses)
        loss, grads = gradient(learner, draw)
        torch.testing.assert_close(loss, losses[0])
        torch.testing.assert_close(flat(grads), wanted(own, other), rtol=1e-4, atol=1e-6)
        harmful.append(bool(own @ other < 0))
        if harmful[-1]:
            assert flat(grads) @ other >= -1e-6 * own.norm() * other.norm()
    assert len(set(harmful)) == 2  # both kinds were seen


def test_memory_is_of_earlier_tasks_alone() -> None:
    stream = little_stream()
    method = make("agem", stream)
    first = after(method, stream, 0)
    draw = entry(first)
    assert "memory" not in draw
    weights = list(first.body.parameters())
    plain = torch.autograd.grad(first(draw), weights)
    for found, own in zip(gradient(first, draw)[1], plain, strict=True):
        assert torch.equal(found, own)
    method.end()
    second = method.begin(stream[1])
    assert set(second.replayed(entry(second)).tasks.tolist()) == {0}
    assert set(second.current(entry(second)).tasks.tolist()) == {1}


def test_other_seeds_remember_other_samples() -> None:
    stream = little_stream()
    found = []
    for seed in (0, 0, 1):
        method = make("agem", stream, seed=seed)
        after(method, stream, 1)
        found.append(method.buffer["images"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_adam_is_refused_in_one_sentence() -> None:
    with pytest.raises(
        rankup.RankupError,
        match="agem projects the gradient, so it needs the optimiser .* sgd, not adam",
    ):
        make("agem", little_stream(), optimiser="adam")


def test_a_weight_decay_is_refused_in_one_sentence() -> None:
    with pytest.raises(rankup.RankupError, match="no step against its memory, .* 0, not 0.05"):
        make("agem", little_stream(), weight_decay=0.05)
