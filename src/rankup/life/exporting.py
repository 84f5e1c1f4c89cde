"""A task as a plain module for other programs, checked against the network before it is kept."""

import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from rankup import seeds
from rankup.data.inputs import ImageInput, Input, TensorInput, TextInput
from rankup.errors import RankupError
from rankup.life.asking import Asked, answers
from rankup.storage.store import load

Format = Literal["onnx", "torch"]

SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2"}
MOST = 1e-5  # of the largest logit, by which an export may differ from the network
_TRIED = (1, 3)  # samples of the batches that an export is tried with


def export(asked: Asked, to: Format, out: Path) -> float:
    """Write a task as one file, and beside it a JSON file with its classes and how its inputs are
    prepared. Returns by how much its logits differ from the network's, as a share of the largest.
    """
    net = load(asked.folder, tasks=[asked.name])
    module = net.merged(asked.name)
    batches = [_sample(asked.inputs, count) for count in _TRIED]
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place, so that what fails the check or is interrupted is never taken for one.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        file = Path(folder) / out.name
        run = (_to_onnx if to == "onnx" else _to_torch)(module, batches[-1], file)
        worst = 0.0
        for x in batches:
            expected = answers(net, asked.name, x)
            gap = (run(x) - expected).abs().max() / expected.abs().max()
            worst = max(worst, float(gap))
        if not worst <= MOST:
            raise RankupError(
                f"task {asked.name!r} cannot be exported to {to}: its logits would differ by "
                f"{worst:.1e} of the largest, expected at most {MOST:.0e}"
            )
        about = file.with_suffix(".json")
        said = {"task": asked.name, "class_names": list(asked.class_names)}
        about.write_text(json.dumps(said | {"inputs": asked.inputs.to_json()}, indent=1) + "\n")
        os.replace(about, out.with_suffix(".json"))
        os.replace(file, out)
    return worst


def _sample(inputs: Input, count: int) -> Tensor:
    """Inputs to try an export with."""
    generator = seeds.generator(0, "export")
    if isinstance(inputs, ImageInput):
        shape = (count, inputs.channels, inputs.size, inputs.size)
        return torch.rand(shape, generator=generator)
    if isinstance(inputs, TextInput):
        return inputs.batch(["a text to try", "another one, which is longer", "one"][:count])
    assert isinstance(inputs, TensorInput)
    if inputs.dtype == "int64":
        return torch.zeros(count, *inputs.shape, dtype=torch.int64)
    return torch.rand(count, *inputs.shape, generator=generator)


def _to_torch(module: nn.Module, x: Tensor, file: Path) -> Callable[[Tensor], Tensor]:
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, file)
    loaded = torch.export.load(file).module()

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = loaded(x)
        return logits

    return run


def _to_onnx(module: nn.Module, x: Tensor, file: Path) -> Callable[[Tensor], Tensor]:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise RankupError(
            f"ONNX needs the package {error.name}, which comes with pip install 'rankup[export]'"
        ) from None
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what its own libraries are going to change
        torch.onnx.export(
            module,
            (x,),
            file,
            dynamo=True,
            external_data=False,
            verbose=False,
            input_names=["inputs"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])

    def run(x: Tensor) -> Tensor:
        (logits,) = session.run(None, {"inputs": x.numpy()})
        return torch.from_numpy(logits)

    return run
