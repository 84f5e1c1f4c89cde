"""The schema of a manifest: types, limits and names, checked before anything is computed from it.

A manifest may come from a stranger. Every check raises `ValueError` with one sentence.
"""

import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from rankup.models import from_hf, from_timm
from rankup.utils.text import is_printable

Check = Callable[[Any, str], None]  # takes a value and its place in the manifest, for errors

_MOST_ENTRIES = 100_000
_LONGEST_NAME = 1_000


def whole(least: int, most: int) -> Check:
    def check(value: Any, where: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            _refuse(where, value, f"a whole number from {least} to {most}")

    return check


def number(least: float, most: float) -> Check:
    def check(value: Any, where: str) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:  # so it is finite, too
            _refuse(where, value, f"a number from {least} to {most}")

    return check


def matching(pattern: str, wanted: str) -> Check:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            _refuse(where, value, wanted)

    return check


def one_of(*choices: Any) -> Check:
    def check(value: Any, where: str) -> None:
        if isinstance(value, dict | list) or value not in choices or type(value) is bool:
            _refuse(where, value, f"one of {', '.join(map(repr, choices))}")

    return check


def boolean(value: Any, where: str) -> None:
    if not isinstance(value, bool):
        _refuse(where, value, "true or false")


def name(value: Any, where: str) -> None:
    """Names are printable, so that they cannot move a terminal's cursor or break a line."""
    if not isinstance(value, str) or len(value) > _LONGEST_NAME or not is_printable(value):
        _refuse(where, value, f"a name of at most {_LONGEST_NAME} printable characters")


def text(longest: int) -> Check:
    """Prose, which may have several lines."""

    def check(value: Any, where: str) -> None:
        is_text = isinstance(value, str) and len(value) <= longest
        if not is_text or not is_printable(value.replace("\n", "")):
            _refuse(where, value, f"a text of at most {longest} printable characters")

    return check


def optional(check: Check) -> Check:
    def check_if_there(value: Any, where: str) -> None:
        if value is not None:
            check(value, where)

    return check_if_there


def either(first: Check, second: Check) -> Check:
    """Values that pass one of two checks. If neither passes, the second one's error is raised."""

    def check(value: Any, where: str) -> None:
        try:
            first(value, where)
        except ValueError:
            second(value, where)

    return check


def listed(entry: Check, least: int = 0, most: int = _MOST_ENTRIES) -> Check:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, list) or not least <= len(value) <= most:
            _refuse(where, value, f"a list of {least} to {most} entries")
        for index, item in enumerate(value):
            entry(item, f"{where}[{index}]")

    return check


def pair(first: Check, second: Check) -> Check:
    def check(value: Any, where: str) -> None:
        listed(lambda *_: None, 2, 2)(value, where)
        first(value[0], f"{where}[0]")
        second(value[1], f"{where}[1]")

    return check


def fields(known: Mapping[str, Check], may_lack: tuple[str, ...] = ()) -> Check:
    """Objects with these keys, each with its check, and no others."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            _refuse(where, value, "an object")
        for key in value.keys() - known.keys():
            raise ValueError(f"{where or 'it'} has an unknown entry {reprlib.repr(key)}")
        for key, entry in known.items():
            if key in value:
                entry(value[key], f"{where}.{key}".lstrip("."))
            elif key not in may_lack:
                raise ValueError(f"{where or 'it'} has no {key!r}")

    return check


def mapping(entry: Check) -> Check:
    """Objects whose keys are names and whose values all pass one check."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict) or len(value) > _MOST_ENTRIES:
            _refuse(where, value, f"an object of at most {_MOST_ENTRIES} entries")
        for key, item in value.items():
            name(key, where)
            entry(item, f"{where}.{key}")

    return check


def _refuse(where: str, value: Any, wanted: str) -> None:
    raise ValueError(f"{where} is {reprlib.repr(value)}, expected {wanted}")


_SIZE = whole(1, 2**31)
_COUNT = whole(0, 2**31)
_SHA256 = matching(r"[0-9a-f]{64}", "a SHA-256")
_SIZES = listed(_SIZE, 1, 3)

_FILE = {"file": name, "size": whole(0, 2**50), "sha256": _SHA256}

_SEEDED = either(whole(0, 2**40), matching(r"\d{1,6}(\.\d{1,6})?x", "a count or a multiple"))
_RANK = fields(
    {
        "first": number(0, 2**31),
        "step": number(0, 2**31),
        "seeded": either(_SEEDED, listed(_SEEDED, 1)),
        "of_outputs": boolean,
        "prune": number(0, 1e9),
    },
    may_lack=("prune",),
)

_CONV = fields(
    {
        "channels": _SIZE,
        "kernel_size": _SIZES,
        "stride": _SIZES,
        "padding": either(one_of("same", "valid"), listed(_COUNT, 1, 3)),
        "dilation": _SIZES,
        "padding_mode": one_of("zeros", "reflect", "replicate", "circular"),
    }
)

_FACTORED: dict[str, Check] = {
    "kind": name,
    "name": name,
    "outputs": _SIZE,
    "inputs": _SIZE,
    "bias": boolean,
    "rank": fields(
        {"first": _COUNT, "step": _COUNT, "seeded": whole(0, 2**40), "prune": boolean},
        may_lack=("prune",),
    ),
    "before_batch_norm": boolean,
    "conv": optional(_CONV),
}

_DTYPE = one_of("float16", "bfloat16", "float32", "float64")
_DTYPES = fields({"computes": _DTYPE, "learns": _DTYPE, "keeps": _DTYPE})

_PARTS: dict[Any, Check] = {
    "factored": fields(
        {**_FACTORED, "dtypes": _DTYPES, "shared_bias": boolean}, may_lack=("dtypes", "shared_bias")
    ),
    "weight": fields(
        {
            **_FACTORED,
            "shape": listed(_SIZE, 1, 64),
            "transposed": boolean,
            "index": _COUNT,
            "dtypes": _DTYPES,
        },
        may_lack=("transposed", "index", "dtypes"),
    ),
    "norm": fields(
        {
            "kind": name,
            "name": name,
            "over": one_of("batch1d", "batch2d", "batch3d", "layer", "rms", "group"),
            "shape": listed(_SIZE, 1, 8),
            "eps": number(0, 1e9),
            "groups": _SIZE,
            "weight": boolean,
            "bias": boolean,
            "shared": boolean,
            "dtypes": _DTYPES,
        },
        may_lack=("dtypes",),
    ),
    "tensor": fields(
        {
            "kind": name,
            "name": name,
            "shape": listed(_COUNT, 0, 64),
            "kept": boolean,
            "dtypes": _DTYPES,
        },
        may_lack=("dtypes",),
    ),
    "head": fields(
        {
            "kind": name,
            "name": name,
            "inputs": _SIZE,
            "bias": boolean,
            "taps": _SIZES,
            "own_forward": boolean,
            "dtypes": _DTYPES,
            "prune": boolean,
        },
        may_lack=("taps", "own_forward", "dtypes", "prune"),
    ),
    "dense": fields(
        {
            "kind": name,
            "tensors": listed(pair(name, listed(_COUNT, 0, 64))),
            "trained": listed(name),
            "kept": boolean,
        }
    ),
}

_MODELS: dict[Any, Check] = {
    None: fields({"model": one_of(None), "class": name}),
    "mlp": fields(
        {
            "model": name,
            "options": fields({"inputs": _SIZE, "hidden": listed(_SIZE, 1, 1000)}),
        }
    ),
    "resnet18": fields(
        {
            "model": name,
            "options": fields({"width": _SIZE, "image_size": _SIZE, "channels": _SIZE}),
        }
    ),
    "timm": fields(
        {
            "model": name,
            "version": name,
            "options": fields(
                {
                    "name": lambda value, _: from_timm.check_name(value),
                    "in_chans": whole(1, 10_000),
                    "img_size": optional(whole(1, 10_000)),
                }
            ),
        }
    ),
    "hf": fields(
        {
            "model": name,
            "version": name,
            "options": lambda value, _: from_hf.check_options(value),
        }
    ),
}


def _of_kind(key: str, kinds: Mapping[Any, Check]) -> Check:
    """Objects whose check depends on the value of one key."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict) or key not in value:
            raise ValueError(f"{where} has no {key!r}")
        one_of(*kinds)(value[key], f"{where}.{key}")
        kinds[value[key]](value, where)

    return check


def _inputs(value: Any, where: str) -> None:
    """A description of inputs; `rankup.data.inputs` checks what is in it."""
    if not isinstance(value, dict):
        _refuse(where, value, "an object")


_SETTING = optional(either(either(boolean, number(-1e300, 1e300)), name))
_ABOUT = fields(
    {
        "class_names": listed(name, 1),
        "inputs": _inputs,
        "recipe": mapping(_SETTING),
        "seed": whole(-(2**63), 2**64),
        "samples": whole(0, 2**50),
        "accuracy": number(0, 1),
    },
    may_lack=("class_names", "inputs", "recipe", "seed", "samples", "accuracy"),
)

check_manifest: Check = fields(
    {
        "format": name,
        "version": whole(1, 2),
        "model": _of_kind("model", _MODELS),
        "dtype": _DTYPE,
        "growth": fields(
            {
                "rank": either(_RANK, listed(pair(name, _RANK), 1)),
                "base": one_of("new", "keep"),
                "include": optional(listed(name)),
                "exclude": listed(name),
                "last": optional(_SIZE),
                "head": optional(either(name, listed(name, 1, 64))),
                "seed": whole(-(2**63), 2**64),
                "store": one_of("full", "float16", "int8"),
                "per_task": listed(name),
                "dtype": _DTYPE,
                "base_dtype": _DTYPE,
                "vectors": one_of("shared"),
                "batch_norms": one_of("shared"),
                "router": name,
            },
            may_lack=(
                *("store", "per_task", "dtype", "base_dtype", "vectors", "batch_norms", "router"),
            ),
        ),
        "parts": listed(_of_kind("kind", _PARTS), 1),
        "seeded": fields({"generator": name, "version": whole(1, 1000), "sha256": _SHA256}),
        "base": optional(fields({**_FILE, "from": name}, may_lack=("from",))),
        "tasks": listed(
            fields(
                {
                    "name": name,
                    "classes": whole(1, 2**31 - 1),
                    "uses": either(one_of("all"), listed(name)),
                    "about": _ABOUT,
                    "views": one_of(4),
                    "kept": mapping(mapping(_COUNT)),
                    **_FILE,
                },
                may_lack=("uses", "about", "views", "kept"),
            )
        ),
        "updating": listed(name),
        "inputs": _inputs,
        "sums": fields({**_FILE, "samples": whole(1, 2**50)}),
    },
    may_lack=("updating", "inputs", "sums"),
)
