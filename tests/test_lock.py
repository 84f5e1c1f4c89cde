"""The lock: what is installed from it is what constraints.txt pins, byte for byte."""

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements.lock").read_text()
NAME = re.compile(r"[A-Za-z0-9._-]+")


def normal(name: str) -> str:
    """A package's name as indices compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def named(requirements: list[str]) -> set[str]:
    found = [NAME.match(requirement) for requirement in requirements]
    return {normal(match[0]) for match in found if match}


def pins(text: str) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE)
    return {normal(name): version for name, version in found}


def test_lock_pins_what_the_constraints_pin() -> None:
    constraints = pins((ROOT / "constraints.txt").read_text())
    locked = pins(LOCK)
    assert len(locked) > 50
    assert locked == {name: constraints.get(name) for name in locked}


def test_lock_holds_everything_but_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = named(project["build-system"]["requires"] + project["project"]["dependencies"])
    of_torch = [line for line in requires("torch") or () if ";" not in line]
    locked = pins(LOCK).keys()
    assert "torch" not in locked
    assert needed | named(of_torch) <= locked | {"torch"}


def test_lock_has_hashes_and_names_no_place() -> None:
    packages = re.split(r"^(?=\w)", re.sub(r"^#.*\n", "", LOCK, flags=re.MULTILINE), flags=re.M)
    for package in filter(None, packages):
        first, *rest = package.splitlines()
        assert re.match(r"[\w.-]+==\S+( ; .*)? \\$", first), first
        assert rest
        for line in rest:
            assert re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line), line
    assert "://" not in LOCK
    assert "index" not in LOCK
