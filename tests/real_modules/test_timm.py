"""Models of timm grow on the first call and keep every promise."""

from pathlib import Path

import pytest

from helpers.promises import assert_promises
from helpers.published import TIMM

pytest.importorskip("timm")
pytestmark = pytest.mark.filterwarnings("ignore")

# A head that is a convolution and scaled weights, two heads.
SAMPLE = ("resnetv2_50", "deit_tiny_distilled_patch16_224")


@pytest.mark.parametrize("name", SAMPLE)
def test_promises_hold(name: str, tmp_path: Path) -> None:
    assert_promises(TIMM[name], tmp_path / "net")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TIMM if name not in SAMPLE])
def test_promises_hold_for_all(name: str, tmp_path: Path) -> None:
    assert_promises(TIMM[name], tmp_path / "net")
