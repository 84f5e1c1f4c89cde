"""The documents' examples run, their links lead somewhere, and the site shows all of them."""

import re
from pathlib import Path

import pytest
import torch

import helpers.published  # noqa: F401 (makes peft importable beside torch's CPU build)
import rankup
from helpers.outside import only_built_in

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES]
NEEDS = {
    "migrating-from-peft.md": "peft",
    "tools.md": "tensorboard",
}  # what a page is about, if it is not installed with us


def examples(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.S)


@pytest.mark.parametrize("path", [*filter(examples, DOCUMENTS)], ids=lambda path: path.name)
def test_python_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order: later examples may use what earlier ones made."""
    if path.name in NEEDS:
        pytest.importorskip(NEEDS[path.name])
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    with only_built_in(monkeypatch):
        for number, code in enumerate(examples(path), 1):
            exec(compile(code, f"{path.name}, example {number}", "exec"), names)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#][^)]*)\)", path.read_text()):
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            assert (path.parent / name).exists(), target
            if anchor:
                headings = re.findall(r"^#+ (.*)$", (path.parent / name).read_text(), re.M)
                # As GitHub makes them: without punctuation.
                plain = [re.sub(r"[^\w -]", "", heading.lower()) for heading in headings]
                assert anchor in {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_tables_begin_with_headings(path: Path) -> None:
    """An empty line inside a table leaves rows that are shown as they are typed."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    for table in re.findall(r"(?:^ *\|.*\n)+", text, re.M):
        assert re.match(r" *\|.*\n *\|[ :|-]+\|\n", table), table


def test_site_has_every_page_and_public_name() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES if f": {page.name}\n" not in nav] == []
    entries = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    shown = {part for entry in entries for part in entry.split(".")}
    assert set(rankup.__all__) - shown == {"OnEpoch"}  # an alias of a type
