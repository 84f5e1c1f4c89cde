"""Seeded factors are the same bits everywhere, forever."""

import hashlib

import numpy as np
import pytest
import torch

from rankup import seeds

# The output of version 1 of the generator. A change here breaks every existing network folder.
GOLDEN = "b2f2db9ad292426b34117606d47b0cbc7b341d8592e6405b717f13a753ece876"


@pytest.mark.parametrize("threads", [1, 2])
def test_golden_bits(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        drawn = seeds.signs(7, "blocks.3.conv1", "V", 129, 345, torch.float32)
    finally:
        torch.set_num_threads(before)
    assert hashlib.sha256(drawn.numpy().tobytes()).hexdigest() == GOLDEN


def test_signs_are_their_bits_scaled_to_unit_length() -> None:
    rows, length = 5, 13
    drawn = seeds.signs(1, "layer", "U", rows, length, torch.float32)
    bits = np.unpackbits(np.frombuffer(seeds.sign_bits(1, "layer", "U", 65), np.uint8), count=65)
    assert torch.equal(drawn.flatten() > 0, torch.from_numpy(bits).bool())
    assert set(drawn.abs().flatten().tolist()) == {
        float(np.float32(1 / np.sqrt(np.float64(length))))
    }
    torch.testing.assert_close(drawn.norm(dim=1), torch.ones(rows))


def test_more_factors_go_on_where_fewer_ended() -> None:
    few = seeds.signs(1, "layer", "U", 3, 10, torch.float64)
    more = seeds.signs(1, "layer", "U", 9, 10, torch.float64)
    assert torch.equal(few, more[:3])


def test_seed_layer_and_table_each_give_other_bits() -> None:
    def bits(*names: object) -> bytes:
        return seeds.sign_bits(*names, 256)

    assert len({bits(0, "a", "U"), bits(1, "a", "U"), bits(0, "b", "U"), bits(0, "a", "V")}) == 4


def test_signs_look_like_fair_coins() -> None:
    drawn = seeds.signs(0, "layer", "V", 64, 1024, torch.float64)
    gram = drawn @ drawn.t()
    assert abs(float((drawn > 0).double().mean()) - 0.5) < 4 * 0.5 / np.sqrt(drawn.numel())
    assert float((gram - torch.eye(64, dtype=torch.float64)).abs().max()) < 6 / np.sqrt(1024)


def test_generators_of_other_names_draw_other_numbers() -> None:
    draws = [torch.rand(4, generator=seeds.generator(*n)) for n in [(0, "a"), (0, "b"), (1, "a")]]
    assert not any(torch.equal(draws[i], draws[j]) for i in range(3) for j in range(i))
