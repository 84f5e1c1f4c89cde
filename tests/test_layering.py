"""No lower layer imports a higher one."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import rankup

ROOT = Path(rankup.__file__).parent

# From the bottom up; those in one row do not import each other. What is not named is below all of
# them.
ORDER = (
    ("runs.request",),
    ("runs.folder",),
    ("runs.run",),
    ("runs.replicas",),
    ("runs.resuming", "runs.launch"),
    ("report",),
    ("runs.progress",),
    ("runs.compare", "runs.tuning"),
    ("paper",),
    ("commands.options",),
    ("commands.compare",),
    ("commands.report",),
    ("commands.network", "commands.paper", "commands.run", "commands.tune"),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: number for number, names in enumerate(ORDER) for name in names}


def name_of(parts: Sequence[str]) -> str:
    """A module's name in `ORDER`: in some folders each module has its own place."""
    return ".".join(parts[: 2 if parts[0] in ("runs", "commands") else 1])


def imports() -> Iterator[tuple[str, str]]:
    """All imports, including those inside functions: a module of ours or a folder of them, and the
    full name of what it imports."""
    for path in ROOT.rglob("*.py"):
        own = name_of(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                yield from ((own, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((own, f"{node.module}.{alias.name}") for alias in node.names)


def test_layers_know_nothing_of_data_files_or_the_command_line() -> None:
    own = {
        name_of(full.split(".")[1:]) for by, full in imports() if by == "layers" and _is_ours(full)
    }
    assert own <= {"errors", "layers", "modes", "seeds", "specs"}


def test_nothing_lower_imports_something_higher() -> None:
    places = [ROOT.joinpath(*name.split(".")) for name in LEVEL]
    assert all(place.with_suffix(".py").exists() or place.is_dir() for place in places)
    found = {(own, name_of(full.split(".")[1:])) for own, full in imports() if _is_ours(full)}
    assert len(found) > 100
    wrong = [
        f"{own} imports {other}"
        for own, other in sorted(found)
        if other in LEVEL and other != own and LEVEL[other] >= LEVEL.get(own, -1)
    ]
    assert not wrong


def _is_ours(full: str) -> bool:
    return full.startswith("rankup.")


def test_only_the_command_line_knows_how_options_are_typed() -> None:
    users = {own for own, full in imports() if full.split(".")[0] == "typer"}
    assert users
    typed = ("cli", "runs.progress")
    assert all(own in typed or own.startswith("commands.") for own in users), users
