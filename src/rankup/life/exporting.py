"""Networks for other programs, one task or all of them, checked against the network before they
are kept."""

import json
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rankup import seeds
from rankup.data.inputs import ImageInput, Input, TensorInput, TextInput
from rankup.errors import RankupError
from rankup.life.asking import Asked, answers
from rankup.net.network import IncrementalNet
from rankup.storage.store import load
from rankup.utils.files import read_regular

Format = Literal["onnx", "torch"]
Run = Callable[..., Tensor]

SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2"}
MOST = 1e-5  # of the largest logit, by which an export may differ from the network
_TRIED = (1, 3)  # samples of the batches that an export is tried with


def said_of(tasks: Sequence[Asked], together: bool) -> dict[str, Any]:
    """What is said in JSON of an export: of one task, or of several in one file."""
    each: list[dict[str, Any]] = [
        {"task": asked.name, "class_names": list(asked.class_names)}
        | {"inputs": asked.inputs.to_json()}
        for asked in tasks
    ]
    return {"tasks": each} if together else each[0]


def taken(out: Path, about: Mapping[str, Any]) -> Path | None:
    """A file of another content in the place of an export, or of what is said of it. The same is
    said of a task whatever it is exported to."""
    said = out.with_suffix(".json")
    if out.exists():
        return out
    return said if said.exists() and read_regular(said) != _as_text(about).encode() else None


def _as_text(about: Mapping[str, Any]) -> str:
    return json.dumps(about, indent=1) + "\n"


def export(asked: Asked, to: Format, out: Path) -> float:
    """Write a task as one file, and beside it a JSON file with its classes and how its inputs are
    prepared. Returns by how much its logits differ from the network's, as a share of the largest.
    """
    net = load(asked.folder, tasks=[asked.name])
    batches = [_sample(asked.inputs, count) for count in _TRIED]

    def gap(file: Path) -> float:
        write = _to_onnx if to == "onnx" else _to_torch
        run = write(net.merged(asked.name), {"inputs": batches[-1]}, file)
        return max(_gap(run(inputs=x), answers(net, asked.name, x)) for x in batches)

    return _kept_if_right(f"task {asked.name!r}", to, out, gap, said_of([asked], False))


def export_all(tasks: Sequence[Asked], out: Path) -> float:
    """Write all tasks of a network as one ONNX file that takes a task's number for each sample,
    and return the worst gap of a task, as `export` does."""
    if len(sizes := {_shape(asked.inputs) for asked in tasks}) > 1:
        raise RankupError(
            f"tasks of inputs of {len(sizes)} sizes cannot be in one file: export them one by one "
            "with --task"
        )
    net = load(tasks[0].folder)
    count = max(len(tasks), *_TRIED)
    x, numbers = _sample(tasks[0].inputs, count), torch.arange(count) % len(tasks)  # [N, ...], [N]

    def gap(file: Path) -> float:
        run = _to_onnx(_Mixed(net), {"inputs": x[:3], "task": numbers[:3]}, file)
        worst = 0.0
        for size in _TRIED:
            for number, asked in enumerate(tasks):
                alone = run(inputs=x[:size], task=torch.full((size,), number))
                worst = max(worst, _gap(alone, answers(net, asked.name, x[:size])))
        mixed = run(inputs=x, task=numbers)
        for row, number in enumerate(numbers.tolist()):
            expected = answers(net, tasks[number].name, x[row : row + 1])
            worst = max(worst, _gap(mixed[row : row + 1], expected))
        return worst

    return _kept_if_right(str(tasks[0].folder), "onnx", out, gap, said_of(tasks, True))


class _Mixed(nn.Module):
    """A network as a module of two inputs by name."""

    def __init__(self, net: IncrementalNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor, task: Tensor) -> Tensor:
        logits: Tensor = self.net(inputs, task=task)
        return logits


def _kept_if_right(
    what: str, to: Format, out: Path, gap: Callable[[Path], float], about: Mapping[str, Any]
) -> float:
    """Let `gap` write a file and compare it; keep it, and what is said about it, if it is right."""
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place, so that what fails the check or is interrupted is never taken for one.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        file = Path(folder) / out.name
        worst = gap(file)
        if not worst <= MOST:
            raise RankupError(
                f"{what} cannot be exported to {to}: its logits would differ by {worst:.1e} of the "
                f"largest, expected at most {MOST:.0e}"
            )
        said = file.with_suffix(".json")
        said.write_text(_as_text(about))
        os.replace(said, out.with_suffix(".json"))
        os.replace(file, out)
    return worst


def _gap(found: Tensor, expected: Tensor) -> float:
    """By how much logits differ, as a share of the largest. Those of a mixed batch are as wide as
    the widest task's, and −∞ beyond their own."""
    own, rest = found[:, : expected.shape[1]], found[:, expected.shape[1] :]
    if not rest.isneginf().all():
        return math.inf
    return float((own - expected).abs().max() / expected.abs().max())


def _shape(inputs: Input) -> tuple[int, ...]:
    if isinstance(inputs, ImageInput):
        return inputs.channels, inputs.size, inputs.size
    return (inputs.length,) if isinstance(inputs, TextInput) else inputs.shape


def _sample(inputs: Input, count: int) -> Tensor:
    """Inputs to try an export with."""
    generator = seeds.generator(0, "export")
    if isinstance(inputs, ImageInput):
        shape = (count, inputs.channels, inputs.size, inputs.size)
        return torch.rand(shape, generator=generator)
    if isinstance(inputs, TextInput):
        texts = ["a text to try", "another one, which is longer", "one"]
        return inputs.batch([texts[number % len(texts)] for number in range(count)])
    assert isinstance(inputs, TensorInput)
    if inputs.dtype == "int64":
        return torch.zeros(count, *inputs.shape, dtype=torch.int64)
    return torch.rand(count, *inputs.shape, generator=generator)


def _program(module: nn.Module, given: Mapping[str, Tensor]) -> torch.export.ExportedProgram:
    """A module for any number of samples, the same of each input."""
    shapes = ({0: torch.export.Dim("batch")},) * len(given)
    return torch.export.export(module, tuple(given.values()), dynamic_shapes=shapes)


def _to_torch(module: nn.Module, given: Mapping[str, Tensor], file: Path) -> Run:
    torch.export.save(_program(module, given), file)
    loaded = torch.export.load(file).module()

    def run(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = loaded(inputs)
        return logits

    return run


def _to_onnx(module: nn.Module, given: Mapping[str, Tensor], file: Path) -> Run:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise RankupError(
            f"ONNX needs the package {error.name}, which comes with pip install 'rankup[export]'"
        ) from None
    for chatty in ("torch.onnx", "onnxscript"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what its own libraries are going to change
        torch.onnx.export(
            _program(module, given),  # given the module, it would try to print it
            (),
            file,
            dynamo=True,
            external_data=False,
            verbose=False,
            input_names=list(given),
            output_names=["logits"],
        )
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])

    def run(**inputs: Tensor) -> Tensor:
        (logits,) = session.run(None, {name: x.numpy() for name, x in inputs.items()})
        return torch.from_numpy(logits)

    return run
