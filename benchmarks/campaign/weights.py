"""Edited weights of all rivals: bits, names, shapes and values."""

import json
import random
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from campaign import users
from campaign.cases import WRONG, Fault, done
from campaign.world import World
from rankup.storage.atomic import json_bytes
from rankup.storage.manifest import MANIFEST, File
from rankup.utils.seal import seal

Tensors = dict[str, Tensor]


def rivals(world: World, draw: random.Random, folder: Path) -> None:
    """One edit of one weights file; then the run is resumed. If all hashes are made to fit again,
    the values of tensors are not judged, but their names, shapes and types are."""
    name = f"{draw.choice(('', 'stopped-'))}{draw.choice(world.rivals)}"
    run = world.copy(name, folder)
    files = sorted((run / "net").rglob("*.safetensors"))
    if not files:  # it has not learned its first task
        files = [run / "checkpoint.safetensors"]
    file = draw.choice(files)
    edit = draw.choice(EDITS)
    before = file.read_bytes()
    after = edited(before, edit, draw)
    file.write_bytes(after)
    resealed = draw.random() < 0.5 and reseal(file)
    done(f"{edit.__name__}{' and resealed' if resealed else ''}: {file.relative_to(run)} of {name}")
    if resealed and edit in OF_VALUES:
        users.check_said(users.resume(run))
        return
    went_on = users.check_resume(run, world.endings[name])
    if went_on and after != before and file.name != "checkpoint.safetensors":
        raise Fault(WRONG, "it was taken")


def edited(content: bytes, edit: "Edit", draw: random.Random) -> bytes:
    if edit is flipped:
        changed = bytearray(content)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        return bytes(changed)
    tensors = safetensors.torch.load(content)
    edit(tensors, draw.choice(sorted(tensors)), draw)
    return safetensors.torch.save(tensors, metadata(content))


def metadata(content: bytes) -> dict[str, str] | None:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]).get("__metadata__")


def reseal(file: Path) -> bool:
    """Make the manifest of a method's weights fit them; whether there is one."""
    path = file.with_name(MANIFEST)
    if not path.exists():
        return False
    data = json.loads(path.read_bytes())
    del data["sha256"]
    data["weights"] = asdict(File.of(file.name, file.read_bytes()))
    path.write_bytes(json_bytes({**data, "sha256": seal(data)}))
    return True


Edit = Callable[[Tensors, str, random.Random], None]


def flipped(tensors: Tensors, name: str, draw: random.Random) -> None:
    """A bit of the file, not of a tensor."""


def removed(tensors: Tensors, name: str, draw: random.Random) -> None:
    del tensors[name]


def renamed(tensors: Tensors, name: str, draw: random.Random) -> None:
    to = draw.choice(("shared/other", "99/head.weight", "kept/x", "buffer/9", "other", ""))
    tensors[to] = tensors.pop(name)


def swapped(tensors: Tensors, name: str, draw: random.Random) -> None:
    other = draw.choice(sorted(tensors))
    tensors[name], tensors[other] = tensors[other], tensors[name]


def reshaped(tensors: Tensors, name: str, draw: random.Random) -> None:
    flat = tensors[name].flatten()
    tensors[name] = draw.choice((flat, flat[None], flat[:1].clone(), flat[:0].clone()))


def retyped(tensors: Tensors, name: str, draw: random.Random) -> None:
    tensors[name] = tensors[name].to(draw.choice((torch.int64, torch.float64, torch.bool)))


def not_numbers(tensors: Tensors, name: str, draw: random.Random) -> None:
    value = draw.choice((float("nan"), float("inf"), -1e30))
    floats = tensors[name].is_floating_point()
    tensors[name] = torch.full_like(tensors[name], value if floats else 1)


def added(tensors: Tensors, name: str, draw: random.Random) -> None:
    tensors[draw.choice(("shared/more", "17/head.weight", "kept/more", "buffer/more", "x"))] = (
        torch.zeros(3)
    )


OF_VALUES = (flipped, swapped, not_numbers)
EDITS: tuple[Edit, ...] = (
    flipped,
    removed,
    renamed,
    swapped,
    reshaped,
    retyped,
    not_numbers,
    added,
)
