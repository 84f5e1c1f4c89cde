"""The page of a network on the Hugging Face Hub, written from what its tasks say of themselves."""

import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from rankup.data.inputs import ImageInput, TextInput
from rankup.life.listing import described, model_of
from rankup.net.about import TaskDescription
from rankup.net.size import kept_from_module
from rankup.storage.manifest import Manifest
from rankup.storage.saving import files_of

CARD = "README.md"
MARK = "<!-- written by rankup push, which writes it anew unless you remove this line -->"

_CLASSES = 20  # of a task that are named
_KINDS = {ImageInput: "image-classification", TextInput: "text-classification"}


def card(folder: Path, manifest: Manifest, repository: str) -> str:
    """A README.md for a network in a repository: YAML for the Hub, then Markdown for people."""
    tasks = described(folder)
    name = repository.rpartition("/")[2]
    blocks = (_front_matter(tasks, name), MARK, *_sections(tasks, manifest, name, repository))
    return "\n\n".join(blocks) + "\n"


def _front_matter(tasks: Sequence[TaskDescription], name: str) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type=_kind(task) or "other",
            task_name=task.title or task.name,
            dataset_type=task.name,
            dataset_name=task.name,
            metric_type="accuracy",
            metric_value=round(task.accuracy, 4),
            metric_name="accuracy on samples that were held out",
        )
        for task in tasks
        if task.accuracy is not None
    ]
    kinds = {kind for task in tasks if (kind := _kind(task))}
    data = ModelCardData(
        library_name="rankup",
        pipeline_tag=kinds.pop() if len(kinds) == 1 else None,
        tags=["rankup", "continual-learning", "task-incremental-learning", "low-rank"],
        model_name=name,
        eval_results=results or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _kind(task: TaskDescription) -> str | None:
    return _KINDS.get(type(task.inputs))


def _sections(
    tasks: Sequence[TaskDescription], manifest: Manifest, name: str, repository: str
) -> Iterator[str]:
    count = f"{len(tasks)} task{'s' if len(tasks) != 1 else ''}"
    yield f"# {_plain(name)}"
    yield (
        f"A network that knows {count}, learned one after another by incremental rank updates: a "
        "new task adds small factors and selects from those of earlier ones, which are never "
        "changed. So no task forgets, and answers stay the same to the bit."
    )
    if tasks:
        yield _how_to_load(tasks[0], manifest, repository)
        yield "## Tasks"
        yield _table(tasks)
        yield from filter(None, map(_about, tasks))
    yield "## Size"
    yield _size(tasks, manifest)


def _how_to_load(task: TaskDescription, manifest: Manifest, repository: str) -> str:
    own = "" if manifest.model["model"] else f", module={manifest.model['class']}()"
    inputs = "net.inputs"
    if task.inputs != manifest.inputs:
        inputs = f"net.describe({task.name!r}).inputs"
    example = "what is to be classified" if isinstance(task.inputs, TextInput) else "a.jpg"
    x = f'{inputs}.batch(["{example}"])' if _kind(task) else "x"
    lines = ["import rankup", f'net = rankup.load("hf://{repository}"{own})']
    lines.append(f"net({x}, task={task.name!r}).softmax(1)")
    return "```python\n" + "\n".join(lines) + "\n```"


def _table(tasks: Sequence[TaskDescription]) -> str:
    rows = [("task", "classes", "right, of what was held out", "numbers added", "builds on")]
    rows.append(("---", "---:", "---:", "---:", "---"))
    for task in tasks:
        right = "–" if task.accuracy is None else f"{task.accuracy:.1%}"
        uses = ", ".join(task.uses) if len(task.uses) < 4 else f"{len(task.uses)} tasks"
        counts = str(task.classes), right, f"{task.numbers:,}"
        rows.append((_plain(task.name), *counts, _plain(uses) or "–"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _about(task: TaskDescription) -> str:
    """What a task is: title, description, classes, inputs."""
    title = f" ({_plain(task.title)})" if task.title else ""
    said = [_plain(task.description)] if task.description else []
    if task.class_names:
        rest = len(task.class_names) - _CLASSES
        more = f" and {rest:,} more" if rest > 0 else ""
        said.append(f"Classes: {_plain(', '.join(task.class_names[:_CLASSES]))}{more}.")
    if task.inputs is not None:
        said.append(f"Takes {_plain(str(task.inputs))}.")
    if task.samples is not None:
        said.append(f"Learned from {task.samples:,} samples.")
    return f"**{_plain(task.name)}**{title}: {' '.join(said)}" if said else ""


def _size(tasks: Sequence[TaskDescription], manifest: Manifest) -> str:
    kept = kept_from_module(manifest.specs) if manifest.base else 0
    numbers = sum(task.numbers for task in tasks)
    size = sum(file.size for file in files_of(manifest))
    of_module = f", on {kept:,} that were kept of the module it was grown from" if kept else ""
    return (
        f"Grown from {_plain(model_of(manifest))}. All tasks together store {numbers:,} numbers"
        f"{of_module}: {size:,} bytes. The manifest has the SHA-256 of every file; nothing in this "
        "repository is unpickled or executed."
    )


def _plain(text: str) -> str:
    """Text that Markdown and HTML leave as it is, in one line.

    >>> _plain("a|b <i>")
    'a\\\\|b &lt;i&gt;'
    """
    escaped = html.escape(" ".join(text.split()), quote=False)
    return "".join(f"\\{sign}" if sign in "\\`*_[]|#" else sign for sign in escaped)
