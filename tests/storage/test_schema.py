"""Manifests of strangers, sealed again, are refused in a sentence before anything is made."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rankup
from helpers.zoo import taught
from rankup.layers.spec import HeadSpec, check_parts
from rankup.utils.seal import seal

Edit = Callable[[dict[str, Any]], object]

REFUSED: dict[str, tuple[Edit, str]] = {
    "a rank beyond floats": (
        lambda data: data["growth"]["rank"].update(step=10**400),
        r"growth\.rank.* expected a",
    ),
    "a size that is text": (
        lambda data: data["parts"][0].update(outputs="8"),
        r"parts\[0\]\.outputs is '8', expected a whole number",
    ),
    "a kind that is a list": (
        lambda data: data["parts"][0].update(kind=[]),
        r"parts\[0\]\.kind is \[\], expected one of",
    ),
    "an unknown entry": (lambda data: data.update(extra=1), "it has an unknown entry 'extra'"),
    "an escape sequence": (
        lambda data: data["tasks"][0].update(name="\x1b[2J"),
        r"tasks\[0\]\.name is .* printable characters",
    ),
    "an end of paragraph": (
        lambda data: data["parts"][0].update(name="a\u2029b"),
        r"parts\[0\]\.name is .* printable characters",
    ),
    "two tasks of one name": (
        lambda data: data["tasks"].append(data["tasks"][0]),
        "there is already a task 'task 0'",
    ),
    "more seeded factors than memory": (
        lambda data: data["parts"][0]["rank"].update(seeded=10**10),
        "bytes of memory beyond what its files hold, more than 4,294,967,296",
    ),
    "more seeded factors in its growth alone": (
        lambda data: data["growth"]["rank"].update(seeded=10**10),
        "the module does not fit the network in .*: they differ in ",
    ),
    "a model without end": (
        lambda data: data["model"]["options"].update(hidden=[2**31, 2**31]),
        "its model cannot be built|bytes of memory beyond",
    ),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    rankup.save(taught("mlp"), tmp_path / "net")
    return tmp_path / "net"


@pytest.mark.parametrize("case", REFUSED)
def test_resealed_manifest_is_refused(case: str, saved: Path) -> None:
    edit, message = REFUSED[case]
    data = json.loads((saved / "manifest.json").read_bytes())
    del data["sha256"]
    edit(data)
    (saved / "manifest.json").write_text(json.dumps({**data, "sha256": seal(data)}))
    started = time.perf_counter()
    with pytest.raises(rankup.StoreError, match=message) as refused:
        rankup.load(saved)
    assert "\n" not in str(refused.value)
    assert rankup.verify(saved).problems == (str(refused.value),)
    assert time.perf_counter() - started < 5


def test_many_parts_are_checked_at_once() -> None:
    started = time.process_time()
    with pytest.raises(ValueError, match="it has two parts of the name '7'"):
        check_parts([HeadSpec(str(number), 4, bias=True) for number in (*range(20_000), 7)])
    assert time.process_time() - started < 1


def test_deep_nesting_is_not_json(saved: Path) -> None:
    (saved / "manifest.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(rankup.StoreError, match="is truncated or edited: it is not JSON"):
        rankup.load(saved)


def test_limit_of_memory_can_be_raised(tmp_path: Path) -> None:
    rankup.save(taught("mlp", rank=rankup.Rank(0, 0, seeded=64)), tmp_path)
    with pytest.raises(rankup.StoreError, match="allow more with most_memory"):
        rankup.load(tmp_path, most_memory=1000)
    assert not rankup.verify(tmp_path, most_memory=1000)
    assert rankup.load(tmp_path, most_memory=10**6).tasks
