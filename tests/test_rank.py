"""How much rank a layer gets."""

import numpy as np
import pytest

import rankup
from rankup.rank import LayerRank, Place, Rank, Shape, capped, resolve, rule_from_json, rule_to_json

SHAPES = {"a": Shape(25, 100), "b.c": Shape(20, 30), "b.d": Shape(8, 6)}


def test_fixed_rank_is_the_same_for_all_layers() -> None:
    ranks = resolve(Rank(first=5, step=1), SHAPES)
    assert set(ranks.values()) == {LayerRank(5, 1, 0)}
    assert [ranks["a"].added(Place.number(t)) for t in range(3)] == [5, 1, 1]
    assert [ranks["a"].used(Place.number(t)) for t in range(3)] == [5, 6, 7]


@pytest.mark.parametrize(
    ("share", "outputs", "expected"),
    [
        (0.1, 25, 3),  # 2.5, half up
        (0.02, 20, 1),  # 0.4, but at least 1
        (0.02, 160, 3),  # 3.2
        (0.29, 50, 15),  # 14.5, which is less in binary arithmetic
        (0.5, 3, 2),
        (0, 50, 0),
    ],
)
def test_shares_round_half_up(share: float, outputs: int, expected: int) -> None:
    ranks = resolve(Rank.proportional(first=0.5, step=share), {"a": Shape(outputs, 1000)})
    assert ranks["a"].step == expected


def test_seeded_as_number_multiple_and_per_layer() -> None:
    def seeded(entry: object) -> list[int]:
        return [r.seeded for r in resolve(Rank(1, 1, seeded=entry), SHAPES).values()]

    assert seeded(256) == [256, 256, 256]
    assert seeded("4x") == [100, 80, 32]
    assert seeded("0.5x") == [13, 10, 4]
    assert seeded([7, "2x", 0]) == [7, 40, 0]


def test_seeded_factors_are_not_capped() -> None:
    rank = resolve(Rank(1, 1, seeded=1000), SHAPES)["b.d"]
    assert [rank.used(Place.number(t)) for t in range(3)] == [1001, 1002, 1003]


def test_rules_by_name_pattern_first_match_counts() -> None:
    rule = {"b.c": Rank(3, 2), "b.*": Rank.proportional(0.25, 0.125), "*": Rank(4, 1, seeded=9)}
    ranks = resolve(rule, SHAPES)
    assert ranks == {
        "a": LayerRank(4, 1, 9),
        "b.c": LayerRank(3, 2, 0),
        "b.d": LayerRank(2, 1, 0),
    }
    assert list(ranks) == list(SHAPES)


def test_learned_rank_is_capped_at_the_layers() -> None:
    assert capped(LayerRank(22, 7, 100), SHAPES["a"]) == LayerRank(22, 7, 100)
    assert capped(LayerRank(22, 7, 100), SHAPES["b.c"]) == LayerRank(20, 7, 100)
    assert capped(LayerRank(22, 7, 100), SHAPES["b.d"]) == LayerRank(6, 6, 100)


def test_grow_warns_once_of_all_caps() -> None:
    with pytest.warns(UserWarning, match=r"capped in hidden\.\*$") as caught:
        net = rankup.grow(rankup.models.mlp(2, hidden=[8, 7, 3]), Rank(first=5, step=1))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert [layer.spec.rank.first for layer in net.body.hidden] == [2, 5, 3]


@pytest.mark.parametrize(
    "rule",
    [
        Rank(11, 2, seeded=("4x", 12)),
        Rank.proportional(0.1, 0.02, seeded="4x"),
        {"b*": Rank(1, 0), "*": Rank(0, 0, seeded=5)},
    ],
)
def test_rule_survives_json(rule: object) -> None:
    assert rule_from_json(rule_to_json(rule)) == rule


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rank(first=-1), "first must not be negative, got -1"),
        (lambda: Rank(step=-2), "step must not be negative, got -2"),
        (lambda: Rank(first=0), "first=0 needs seeded factors"),
        (lambda: Rank(first=0, seeded=[4, 0]), "first=0 needs seeded factors in every layer"),
        (lambda: Rank(first=0.1), "whole number, got 0.1; for shares use Rank.proportional"),
        (lambda: Rank(first=True), "first must be a number, got True"),
        (lambda: Rank(first=float("nan")), "first must be a number, got nan"),
        (lambda: Rank.proportional(first=-0.1), "first must not be negative"),
        (lambda: Rank(seeded=-4), "seeded must be a number of factors"),
        (lambda: Rank(seeded="4"), "seeded must be .* got '4'"),
        (lambda: Rank(seeded=2.5), "seeded must be"),
        (lambda: resolve(Rank(seeded=[4, 5]), SHAPES), "2 numbers for 3 layers"),
        (lambda: resolve({"b.*": Rank()}, SHAPES), "no rank rule matches layer 'a'"),
        (lambda: resolve({"z": Rank(), "*": Rank()}, SHAPES), "'z' applies to none of the layers"),
        (lambda: resolve(11, SHAPES), "rank must be a Rank .* got 11"),
    ],
)
def test_bad_rules_are_refused(make: object, message: str) -> None:
    with pytest.raises(rankup.RankupError, match=message):
        make()


@pytest.mark.parametrize("shares", [(11.0, 0.5), (0.1, 1.5)])
def test_shares_above_one_are_refused(shares: tuple[float, float]) -> None:
    with pytest.raises(rankup.RankupError, match="must be a share of a layer's outputs, from 0 to"):
        rankup.Rank.proportional(*shares)


def test_numpy_numbers_are_accepted() -> None:
    given = Rank(np.int64(3), np.int32(1), seeded=[np.int64(7), "2x"])
    assert given == Rank(3, 1, seeded=[7, "2x"])
    assert [type(part) for part in (given.first, given.step)] == [int, int]
    assert Rank.proportional(np.float32(0.5), np.float64(0.25)) == Rank.proportional(0.5, 0.25)
    assert rule_from_json(rule_to_json(given)) == given
    module, one = rankup.models.mlp(8, hidden=[8, 8]), np.int64(1)
    net = rankup.grow(module, Rank(1, 1), last=one, seed=one + 6)
    assert (net.options.last, net.options.seed) == (1, 7)
    with pytest.raises(rankup.RankupError, match="first must be a number, got True"):
        Rank(True, 1)
