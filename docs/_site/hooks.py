"""Hooks of the documentation site: pages from the root, links out of docs/, formulas as MathML."""

import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
DATA = ("results", "benchmarks/results")


def on_files(files: Files, config: Any) -> Files:
    """Add the root's documents, and the measured data that pages link to."""
    for page, document in PAGES.items():
        text = (ROOT / document).read_text(encoding="utf-8")
        for name, title in PAGES.items():
            text = text.replace(f"]({title})", f"]({name})")
        files.append(File.generated(config, page, content=re.sub(r'(\]\(|")docs/', r"\1", text)))
    for folder in DATA:
        for file in sorted((ROOT / folder).rglob("*.json")):
            name = file.relative_to(ROOT).as_posix()
            files.append(File.generated(config, f"data/{name}", abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links at what the site has; a link to anything else of the repository becomes text."""
    markdown = re.sub(r"\]\(\.\./([^)#]*results/[^)]*\.json)\)", r"](data/\1)", markdown)
    markdown = re.sub(r"\[([^\]]*)\]\((\.\./|examples|CITATION)[^)]*\)", r"\1", markdown)
    return "".join(
        text if text.startswith("`") else _with_formulas(text)
        for text in re.split(r"(```.*?```|`[^`\n]*`)", markdown, flags=re.S)
    )


def _with_formulas(text: str) -> str:
    text = re.sub(
        r"\$\$(.+?)\$\$", lambda found: convert(found[1], display="block"), text, flags=re.S
    )
    return re.sub(r"\$([^$\n]+)\$", lambda found: convert(found[1]), text)
