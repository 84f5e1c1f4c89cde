"""What the documents show runs."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def examples() -> list[tuple[str, str]]:
    return [
        (f"{path.name} {index}", code)
        for path in DOCUMENTS
        for index, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S))
    ]


@pytest.mark.parametrize(("name", "code"), examples(), ids=[name for name, _ in examples()])
def test_python_examples_run(
    name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(code, name, "exec"), {})


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
