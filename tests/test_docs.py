"""The examples in the documents run."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def examples(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.S)


@pytest.mark.parametrize("path", [*filter(examples, DOCUMENTS)], ids=lambda path: path.name)
def test_python_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order: later examples may use what earlier ones made."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {}
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
