"""Packages import in one direction: nothing lower imports something higher."""

import ast
from collections.abc import Iterator
from pathlib import Path

import rankup

ROOT = Path(rankup.__file__).parent

# From the bottom up. A package imports only those before it, also inside functions and under
# TYPE_CHECKING. The lazy public names of rankup/__init__ are the one exception.
ORDER = (
    "errors",
    "seeds",
    "rank",
    "metrics",
    "utils",
    "distributed",
    "data",
    "models",
    "layers",
    "growing",
    "net",
    "storage",
    "interop",
    "kernels",
    "training",
    "methods",
    "runs",
    "report",
    "paper",
    "testing",
    "life",
    "inference",
    "cli",
    "__main__",
)


def imports() -> Iterator[tuple[str, str]]:
    """All imports: a package or a module of the root, and the full name of what it imports."""
    for path in ROOT.rglob("*.py"):
        package = path.relative_to(ROOT).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                yield from ((package, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} has a relative import"
                yield from ((package, f"{node.module}.{alias.name}") for alias in node.names)


def test_every_package_has_its_place() -> None:
    found = {path.stem for path in ROOT.iterdir() if not path.name.startswith(("__pyc", "py."))}
    assert found - {"__init__"} == set(ORDER)


def test_nothing_imports_what_is_higher() -> None:
    level = {name: number for number, name in enumerate(ORDER)}
    edges = {
        (package, full.split(".")[1])
        for package, full in imports()
        if package in level and full.startswith("rankup.") and full.split(".")[1] in level
    }
    assert len(edges) > 50
    wrong = [f"{a} imports {b}" for a, b in sorted(edges) if level[b] > level[a]]
    assert not wrong


def test_root_has_few_files() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 8


def test_only_cli_imports_typer() -> None:
    assert {package for package, full in imports() if full.split(".")[0] == "typer"} == {"cli"}
