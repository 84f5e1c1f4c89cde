"""Models of transformers from a folder or the Hub, called with one tensor: token ids or images.

They are rebuilt from their configuration, which is plain data: nothing is downloaded, and only the
code of transformers runs.
"""

import json
import math
import os
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rankup.data.inputs import ImageInput, Input, TextInput
from rankup.data.texts import columns_used
from rankup.errors import RankupError
from rankup.models.packages import first_line, imported
from rankup.utils.files import read_regular

Kind = Literal["text", "image"]
Head = Literal["mean", "own"]

_LENGTH = 64  # tokens of a text

# Entries of a configuration that are not needed to build a model, and entries by which transformers
# would load code or weights from elsewhere.
_DROPPED = {"architectures", "dtype", "torch_dtype", "transformers_version", "id2label"}
_DROPPED |= {"label2id", "num_labels", "problem_type", "output_attentions", "output_hidden_states"}
_DROPPED |= {"attn_implementation", "experts_implementation", "task_specific_params"}
_REFUSED = {"auto_map", "quantization_config", "trust_remote_code", "backbone", "backbone_config"}
_REFUSED |= {"use_pretrained_backbone", "use_timm_backbone", "custom_pipelines"}

_MOST_ENTRIES = 10_000
_DEEPEST = 8
_LARGEST = 1 << 24  # no size of a layer or number of layers is larger
_LONGEST = 1_000  # characters


class MeanClassifier(nn.Module):
    """A classifier of texts, from token ids `[B, L]` to logits: a Linear on the mean of the last
    hidden states, without those of padding. Encoders of sentences are trained with this mean.

    Args:
        model: an encoder.
        pad: the id of the padding.
        hidden: size of its hidden states.
        classes: number of logits.
    """

    def __init__(self, model: nn.Module, pad: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.model, self.pad = model, pad
        self.head = nn.Linear(hidden, classes)

    def forward(self, ids: Tensor) -> Tensor:
        ids = _shortened(ids, self.pad)
        mask = ids != self.pad  # [B, L]
        states = self.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        share = mask.to(states.dtype).unsqueeze(-1)  # [B, L, 1]
        logits: Tensor = self.head((states * share).sum(1) / share.sum(1).clamp(min=1))
        return logits

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """Inputs to try the model with, like the attribute of transformers' models."""
        return {"ids": self.model.dummy_inputs["input_ids"]}  # type: ignore[index]

    def get_classifier(self) -> nn.Module:
        """The head. Named as in timm, since torch.fx cannot trace the model to find it."""
        return self.head


class OwnClassifier(nn.Module):
    """A model with its own classifier, from images `[B, C, H, W]` or token ids `[B, L]` to logits.

    Args:
        model: the model.
        kind: what it classifies.
        pad: the id of the padding of texts.
    """

    def __init__(self, model: nn.Module, kind: Kind, pad: int) -> None:
        super().__init__()
        self.model, self.kind, self.pad = model, kind, pad
        self.config = model.config  # which tells how many outputs the head has

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "image":
            answer = self.model(pixel_values=x)
        else:
            x = _shortened(x, self.pad)
            answer = self.model(input_ids=x, attention_mask=(x != self.pad).long())
        logits: Tensor = answer.logits
        return logits

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """Inputs to try the model with, like the attribute of transformers' models."""
        name = "pixel_values" if self.kind == "image" else "input_ids"
        return {"x": self.model.dummy_inputs[name]}  # type: ignore[index]


def _shortened(ids: Tensor, pad: int) -> Tensor:
    """Leave out the columns of token ids `[B, L]` that are padding in every text of the batch.

    On a GPU, where reading the ids would wait for the device, they stay as they are, and in graphs
    that are compiled, traced or exported, where their shape must not depend on their values.
    """
    if (
        ids.device.type != "cpu"
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
    ):
        return ids
    return ids[:, : columns_used(ids, pad)]


def read_options(name: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the options by which `make` builds a model of a folder or of the Hub, as plain data."""
    transformers = imported("transformers", f"hf:{name}")
    with _one_sentence(f"hf:{name}"):
        config = transformers.AutoConfig.from_pretrained(os.fspath(name), trust_remote_code=False)
    own = any("ForSequenceClassification" in each for each in config.architectures or ())
    kind = _kind_of(transformers, config, name)
    pad = next(
        (each for each in (config.pad_token_id, *_as_list(config.eos_token_id)) if each is not None)
        if kind == "text"
        else iter(()),
        0,
    )
    head: Head = "own" if own or config.is_encoder_decoder or kind == "image" else "mean"
    options = {"config": _plain(config.to_diff_dict()), "kind": kind, "head": head, "pad": pad}
    try:
        check_options(options)
    except ValueError as error:
        raise RankupError(f"hf:{name} cannot be described as plain data: {error}") from None
    return options


def make(
    options: dict[str, Any],
    name: str | os.PathLike[str] | None = None,
    classes: int = 10,
) -> nn.Module:
    """Build a model.

    Args:
        options: made by `read_options`.
        name: the folder or name on the Hub to load weights from; None for random ones.
        classes: outputs of its head.
    """
    check_options(options)
    kind, pad = options["kind"], options["pad"]
    wanted_by = f"hf:{options['config']['model_type'] if name is None else name}"
    transformers = imported("transformers", wanted_by)
    auto = {
        ("image", "own"): transformers.AutoModelForImageClassification,
        ("text", "own"): transformers.AutoModelForSequenceClassification,
        ("text", "mean"): transformers.AutoModel,
    }[kind, options["head"]]
    with _quiet(), _one_sentence(wanted_by):
        config = transformers.AutoConfig.for_model(**options["config"])
        if options["head"] == "own":
            config.num_labels = classes
        if kind == "text" and config.pad_token_id is None:
            config.pad_token_id = pad
        model = _built(auto, config, name, pooled=options["head"] == "own")
        model.eval()
        if options["head"] == "own":
            return OwnClassifier(model, kind, pad)
        return MeanClassifier(model, pad, config.hidden_size, classes)


def _built(auto: Any, config: Any, name: str | os.PathLike[str] | None, pooled: bool) -> nn.Module:
    # A pooler that is not used would be stored and get factors. Most models can be built without.
    for extra in ({},) if pooled else ({"add_pooling_layer": False}, {}):
        try:
            if name is None:
                model = auto.from_config(config, trust_remote_code=False, **extra)
            else:
                model = auto.from_pretrained(
                    os.fspath(name),
                    config=config,
                    trust_remote_code=False,
                    use_safetensors=True,  # nothing is unpickled
                    dtype=torch.float32,
                    ignore_mismatched_sizes=True,  # of the head, which each task has anew
                    **extra,
                )
        except TypeError as error:
            if not extra or "add_pooling_layer" not in str(error):
                raise
        else:
            assert isinstance(model, nn.Module)
            return model
    raise AssertionError


def inputs_of(name: str | os.PathLike[str], options: dict[str, Any]) -> Input:
    """The inputs of a published model, according to its preprocessor or tokenizer."""
    if options["kind"] == "text":
        longest = options["config"].get("max_position_embeddings") or _LENGTH
        return TextInput.of(name, min(_LENGTH, longest), options["pad"])
    about = _preprocessor(name)
    size = _side(about.get("crop_size") or about.get("size")) or options["config"].get("image_size")
    scaled = _side(about.get("size")) or size
    size = size if isinstance(size, int) else 224
    cropped = isinstance(scaled, int) and about.get("do_center_crop", "crop_size" in about)
    channels = 1 if options["config"].get("num_channels") == 1 else 3
    return ImageInput(
        size=size,
        channels=channels,  # type: ignore[arg-type]
        crop=min(1.0, size / scaled) if cropped else 1.0,
        crop_mode="center" if cropped else "squash",
        mean=tuple(about.get("image_mean") or [0.0]),
        std=tuple(about.get("image_std") or [1.0]),
        interpolation={1: "lanczos", 3: "bicubic"}.get(about.get("resample", 2), "bilinear"),  # type: ignore[arg-type]
    )


def check_options(options: Any) -> None:
    """Raise `ValueError` for options that are not small plain data, or that would load code or
    weights from elsewhere: they may come from a stranger."""
    if not isinstance(options, dict) or options.keys() != {"config", "kind", "head", "pad"}:
        raise ValueError("a model of transformers has a config, a kind, a head and a pad")
    if (options["kind"], options["head"]) not in {
        ("text", "mean"),
        ("text", "own"),
        ("image", "own"),
    }:
        raise ValueError(
            f"a model of transformers is of kind text or image with its own head or the mean's, "
            f"got {reprlib.repr(options['kind'])} and {reprlib.repr(options['head'])}"
        )
    if type(options["pad"]) is not int or not 0 <= options["pad"] <= _LARGEST:
        raise ValueError(f"pad is {reprlib.repr(options['pad'])}, expected an index of a token")
    config = options["config"]
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError("the config of a model has no model_type")
    for entries, (place, value, depth) in enumerate(_walk(config, "config", 0)):
        if entries > _MOST_ENTRIES or depth > _DEEPEST:
            raise ValueError("the config of a model is too large or too deep")
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value) or (isinstance(value, int) and abs(value) > _LARGEST):
                raise ValueError(f"{place} is {value}, expected a number up to {_LARGEST}")
        elif isinstance(value, str):
            if len(value) > _LONGEST or not value.isprintable():
                raise ValueError(f"{place} is no short and printable text")
        elif not isinstance(value, dict | list | bool | None):
            raise ValueError(f"{place} is {type(value).__name__}, expected plain data")


def _walk(value: Any, place: str, depth: int) -> Iterator[tuple[str, Any, int]]:
    yield place, value, depth
    if depth > _DEEPEST:
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str) or not key.isprintable() or len(key) > _LONGEST:
                raise ValueError(f"{place} has an entry {reprlib.repr(key)}, expected a name")
            if key in _REFUSED | _DROPPED or key.startswith("_"):
                raise ValueError(f"{place} has an entry {key!r}, which is not taken from a file")
            yield from _walk(inner, f"{place}.{key}", depth + 1)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _walk(inner, f"{place}[{index}]", depth + 1)


def _plain(config: Any) -> Any:
    """A configuration as JSON, without entries that are not needed to build a model."""
    if isinstance(config, dict):
        return {
            str(key): _plain(value)
            for key, value in config.items()
            if str(key) not in _DROPPED and not str(key).startswith("_")
        }
    return [_plain(value) for value in config] if isinstance(config, list | tuple) else config


def _kind_of(transformers: Any, config: Any, name: str | os.PathLike[str]) -> Kind:
    auto = transformers.models.auto.modeling_auto
    if type(config) in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return "text"
    if type(config) in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        return "image"
    raise RankupError(
        f"hf:{name} is a {config.model_type}, which transformers classifies neither texts nor "
        "images with"
    )


def _preprocessor(name: str | os.PathLike[str]) -> dict[str, Any]:
    """The entries of a model's preprocessor_config.json; empty if there is none."""
    file = Path(os.path.expanduser(name)) / "preprocessor_config.json"
    if not Path(os.path.expanduser(name)).is_dir():
        from huggingface_hub import hf_hub_download

        try:
            file = Path(hf_hub_download(os.fspath(name), file.name))
        except Exception:  # of many kinds; most often there is no such file
            return {}
    try:
        about = json.loads(read_regular(file, 1 << 20))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def _side(size: Any) -> int | None:
    """The side of a size as preprocessors give it: a number, or sides by their names."""
    if isinstance(size, dict):
        size = next((size[key] for key in ("shortest_edge", "height") if key in size), None)
    return size if isinstance(size, int) and size > 0 else None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def _one_sentence(wanted_by: str) -> Iterator[None]:
    try:
        yield
    except RankupError:
        raise
    except ModuleNotFoundError as error:  # by transformers, without the package or the reason
        raise RankupError(
            f"{wanted_by} needs a package that does not load: {first_line(_first_cause(error))}"
        ) from error
    # Downloads and configurations raise errors of many kinds.
    except Exception as error:
        raise RankupError(f"{wanted_by} cannot be made: {first_line(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, transformers shows no progress bar, and no report on weights of the head, which are
    always new."""
    theirs = imported("transformers", "quiet").utils.logging
    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()
