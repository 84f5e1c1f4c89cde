"""Nothing lower imports something higher."""

import ast
from collections.abc import Iterator
from pathlib import Path

import rankup

ROOT = Path(rankup.__file__).parent

# From below, and beside each other those that do not know each other. What is not named is below
# all of them.
ORDER = (
    ("request",),
    ("folder",),
    ("run",),
    ("replicas",),
    ("begun", "launch"),
    ("report",),
    ("progress",),
    ("compare", "tuning"),
    ("paper",),
    ("cli_options",),
    ("cli_compare",),
    ("cli_paper", "cli_tune"),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: number for number, names in enumerate(ORDER) for name in names}


def imports() -> Iterator[tuple[str, str]]:
    """All imports, also those inside functions: a module of ours or a folder of them, and what it
    imports, by its full name."""
    for path in ROOT.rglob("*.py"):
        own = path.relative_to(ROOT).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                yield from ((own, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((own, f"{node.module}.{alias.name}") for alias in node.names)


def test_nothing_lower_imports_something_higher() -> None:
    assert all((ROOT / f"{name}.py").exists() or (ROOT / name).is_dir() for name in LEVEL)
    found = {(own, *full.split(".")[:2]) for own, full in imports()}
    wrong = [
        f"{own} imports {other}"
        for own, package, *rest in sorted(found)
        for other in rest
        if package == "rankup" and other in LEVEL and other != own
        if LEVEL[other] >= LEVEL.get(own, -1)
    ]
    assert not wrong


def test_only_the_command_line_knows_how_options_are_typed() -> None:
    users = {own for own, full in imports() if full.split(".")[0] == "typer"}
    assert all(own == "progress" or own.startswith("cli") for own in users), users
