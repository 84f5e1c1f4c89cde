"""Models of transformers grow on the first call and keep every promise."""

from pathlib import Path

import pytest

from helpers.promises import assert_promises
from helpers.published import TRANSFORMERS

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

# One of each kind of trouble: a head by name, tied modules, weights that a forward reads itself,
# stacked experts, tokens.
SAMPLE = ("BERT", "GPT-2", "Mixtral", "Mamba")


@pytest.mark.parametrize("name", SAMPLE)
def test_promises_hold(name: str, tmp_path: Path) -> None:
    assert_promises(TRANSFORMERS[name], tmp_path / "net")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TRANSFORMERS if name not in SAMPLE])
def test_promises_hold_for_all(name: str, tmp_path: Path) -> None:
    assert_promises(TRANSFORMERS[name], tmp_path / "net")
