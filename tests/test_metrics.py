"""Accuracy and forgetting equal hand-worked small cases."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankup.errors import RankupError
from rankup.metrics import AccuracyMatrix, Footprint, numbers

FORGETS = AccuracyMatrix([[0.9], [0.6, 0.8], [0.3, 0.7, 1.0]])
IMPROVES = AccuracyMatrix([[0.5], [0.6, 0.7], [0.9, 0.8, 0.4]])


def test_forgetting_of_a_worked_example() -> None:
    assert FORGETS.average_accuracy(1) == pytest.approx(0.9)
    assert FORGETS.average_accuracy(2) == pytest.approx(0.7)  # (0.6 + 0.8) / 2
    assert FORGETS.average_accuracy(3) == pytest.approx(2 / 3)  # (0.3 + 0.7 + 1.0) / 3
    assert FORGETS.forgetting(1) == 0
    assert FORGETS.forgetting(2) == pytest.approx(0.3)  # 0.9 − 0.6
    assert FORGETS.forgetting(3) == pytest.approx(0.35)  # ((0.9 − 0.3) + (0.8 − 0.7)) / 2
    assert FORGETS.backward_transfer(3) == pytest.approx(-0.35)


def test_forgetting_may_be_negative() -> None:
    assert IMPROVES.average_accuracy() == pytest.approx(0.7)  # (0.9 + 0.8 + 0.4) / 3
    assert IMPROVES.forgetting(2) == pytest.approx(-0.1)  # 0.5 − 0.6
    assert IMPROVES.forgetting() == pytest.approx(-0.25)  # ((0.5 − 0.9) + (0.7 − 0.8)) / 2
    assert IMPROVES.backward_transfer() == pytest.approx(0.25)


def test_forgetting_compares_with_when_learned() -> None:
    matrix = AccuracyMatrix([[0.5], [0.9, 0.7], [0.6, 0.7, 0.8]])
    assert matrix.forgetting() == pytest.approx(-0.05)  # not ((0.9 − 0.6) + 0) / 2 = 0.15


def test_forward_transfer_is_against_independent_networks() -> None:
    # The diagonal is 0.9, 0.8, 1.0.
    assert FORGETS.forward_transfer([0.8, 0.8, 0.7]) == pytest.approx(0.4 / 3)
    assert FORGETS.forward_transfer([1.0, 1.0, 1.0]) == pytest.approx(-0.1)


def test_first_task_has_no_forgetting() -> None:
    matrix = AccuracyMatrix([[0.25]])
    assert matrix.average_accuracy() == 0.25
    assert matrix.forgetting() == 0
    assert math.copysign(1, matrix.backward_transfer()) == 1  # 0, not −0, which prints badly


def test_as_array_has_nan_above_the_diagonal() -> None:
    expected = [[0.9, np.nan, np.nan], [0.6, 0.8, np.nan], [0.3, 0.7, 1.0]]
    np.testing.assert_array_equal(FORGETS.as_array(), expected)
    assert AccuracyMatrix().as_array().shape == (0, 0)


def test_rows_may_be_numpy() -> None:
    matrix = AccuracyMatrix()
    matrix.add(np.array([0.5], dtype=np.float32))
    assert matrix.rows == [[0.5]]
    assert type(matrix.rows[0][0]) is float


@st.composite
def matrices(draw: st.DrawFn) -> AccuracyMatrix:
    fractions = st.floats(0, 1)
    tasks = draw(st.integers(1, 7))
    return AccuracyMatrix(
        [draw(st.lists(fractions, min_size=t, max_size=t)) for t in range(1, tasks + 1)]
    )


@given(matrices())
def test_identities(matrix: AccuracyMatrix) -> None:
    array = matrix.as_array()
    for t in range(1, len(matrix) + 1):
        assert matrix.average_accuracy(t) == pytest.approx(np.nanmean(array[t - 1]))
        assert matrix.backward_transfer(t) == -matrix.forgetting(t)
        assert -1 <= matrix.forgetting(t) <= 1
    assert matrix.average_accuracy() == matrix.average_accuracy(len(matrix))
    assert matrix.forgetting(1) == 0
    assert matrix.forward_transfer(list(np.diag(array))) == 0
    # Accuracy when learned, less what was forgotten since, is accuracy now.
    tasks = len(matrix)
    now = np.diag(array).sum() - (tasks - 1) * matrix.forgetting()
    assert tasks * matrix.average_accuracy() == pytest.approx(now)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_unchanged_accuracy_is_zero_forgetting(accuracies: list[float]) -> None:
    matrix = AccuracyMatrix([accuracies[: t + 1] for t in range(len(accuracies))])
    assert all(matrix.forgetting(t) == 0 for t in range(1, len(matrix) + 1))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0.5], "after task 2 an accuracy for each of 2 tasks is expected, got 1"),
        ([0.5, 0.5, 0.5], "each of 2 tasks is expected, got 3"),
        ([0.5, 1.01], "a fraction between 0 and 1, got 1.01"),
        ([93.4, 0.5], "a fraction between 0 and 1, got 93.4"),
        ([0.5, -0.1], "a fraction between 0 and 1, got -0.1"),
        ([0.5, float("nan")], "a fraction between 0 and 1, got nan"),
        ([0.5, "0.5"], "a fraction between 0 and 1, got '0.5'"),
        ([0.5, None], "a fraction between 0 and 1, got None"),
        ([0.5, True], "a fraction between 0 and 1, got True"),
        (0.5, "a row of accuracies is expected after task 2, got 0.5"),
        ("ab", "a row of accuracies is expected after task 2, got 'ab'"),
    ],
)
def test_bad_rows_are_refused(row: object, message: str) -> None:
    matrix = AccuracyMatrix([[0.9]])
    with pytest.raises(RankupError, match=message):
        matrix.add(row)
    assert matrix.rows == [[0.9]]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: AccuracyMatrix().average_accuracy(), "no task has been learned yet"),
        (lambda: AccuracyMatrix().forgetting(), "no task has been learned yet"),
        (lambda: AccuracyMatrix().forward_transfer([]), "no task has been learned yet"),
        (lambda: FORGETS.forgetting(0), "t must be between 1 and the 3 tasks learned, got 0"),
        (lambda: FORGETS.average_accuracy(4), "t must be between 1 .* got 4"),
        (lambda: FORGETS.forward_transfer([0.5]), "expected for each of 3 tasks, got 1"),
        (lambda: FORGETS.forward_transfer([0.5, 0.5, 50]), "between 0 and 1, got 50"),
        (lambda: AccuracyMatrix([[0.5], [0.5]]), "each of 2 tasks is expected, got 1"),
    ],
)
def test_bad_arguments_are_refused(ask: object, message: str) -> None:
    with pytest.raises(RankupError, match=message):
        ask()


def test_storage_is_counted_in_float32_numbers() -> None:
    assert numbers(4 * 109_020) == 109_020
    assert numbers(1_000_000 // 8) == 31_250  # a mask of a million bits
    assert Footprint(numbers(400)) == Footprint(parameters=100, buffer=0)
