"""The manifest of a network folder: what the network is, its tasks in order and every file's
SHA-256. It holds no times, hosts or paths, so equal networks have equal manifests."""

import functools
import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rankup import models, rank, seeds
from rankup.errors import StoreError
from rankup.growing.options import GrowOptions
from rankup.layers.spec import DenseSpec, FactoredSpec, Spec, from_json, to_json
from rankup.net.tasks import KnownTask
from rankup.storage.atomic import json_bytes

FORMAT = "rankup network"
VERSION = 1
MANIFEST = "manifest.json"
BASE = "base.safetensors"


@dataclass(frozen=True)
class File:
    """A file of the folder as it was written."""

    file: str
    size: int
    sha256: str

    @classmethod
    def of(cls, name: str, content: bytes) -> "File":
        return cls(name, len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True)
class Manifest:
    model: dict[str, Any]
    dtype: torch.dtype
    options: GrowOptions
    specs: tuple[Spec, ...]
    base: File | None
    tasks: tuple[tuple[KnownTask, File], ...]
    updating: tuple[str, ...] = ()  # dense buffers that their modules would change by themselves

    def to_bytes(self) -> bytes:
        options = {**vars(self.options), "rank": rank.rule_to_json(self.options.rank)}
        data = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "dtype": str(self.dtype).removeprefix("torch."),
            "growth": options,
            "parts": [to_json(spec) for spec in self.specs],
            "seeded": {
                "generator": seeds.SIGNS_GENERATOR,
                "version": seeds.SIGNS_VERSION,
                "sha256": seeded_hash(self.options.seed, self.specs),
            },
            "base": asdict(self.base) if self.base else None,
            "tasks": [{**asdict(task), **asdict(file)} for task, file in self.tasks],
            **({"updating": list(self.updating)} if self.updating else {}),
        }
        sealed = {**data, "sha256": _seal(data)}
        return json_bytes(sealed)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        path = folder / MANIFEST
        try:
            data = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            inside = folder / "net"
            hint = f"; there is one in {inside}" if (inside / MANIFEST).exists() else ""
            raise StoreError(
                f"there is no network in {folder}: it has no {MANIFEST}{hint}"
            ) from None
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError:
            raise StoreError(f"{path} is truncated or edited: it is not JSON") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise StoreError(f"{path} is not the manifest of a rankup network")
        if data.get("version") != VERSION:
            raise StoreError(
                f"{path} has format version {data.get('version')}, but this rankup reads version "
                f"{VERSION}: it was written by a newer rankup"
            )
        if data.pop("sha256", None) != _seal(data):
            raise StoreError(f"{path} was edited: it does not match its own SHA-256")
        try:
            return cls._from_json(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"{path} is not a valid manifest: {error}") from error

    @classmethod
    def _from_json(cls, data: dict[str, Any]) -> "Manifest":
        given = data["growth"]
        options = GrowOptions(
            rank=rank.rule_from_json(given["rank"]),
            base=given["base"],
            include=None if given["include"] is None else tuple(given["include"]),
            exclude=tuple(given["exclude"]),
            last=given["last"],
            head=given["head"],
            seed=given["seed"],
            store=given.get("store", "full"),
        )
        parts = tuple(from_json(part) for part in data["parts"])
        dtype = getattr(torch, data["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{data['dtype']!r} is not a dtype of torch")
        models.check(data["model"])
        _check_seeded(data["seeded"], options.seed, parts)
        tasks = []
        for index, entry in enumerate(data["tasks"]):
            task = KnownTask(entry["name"], entry["classes"])
            # The file's name follows from the task: no manifest can point outside its folder.
            if entry["file"] != task_file(index, task.name):
                raise ValueError(
                    f"task {index + 1} is {task.name!r}, so its file cannot be {entry['file']!r}"
                )
            tasks.append((task, File(entry["file"], entry["size"], entry["sha256"])))
        return cls(
            data["model"],
            dtype,
            options,
            parts,
            File(**{**data["base"], "file": BASE}) if data["base"] else None,
            tuple(tasks),
            _known_buffers(data.get("updating", []), parts),
        )


def task_file(index: int, task: str) -> str:
    """The name of a task's file.

    >>> task_file(0, "fine birds: 5")
    'tasks/0001-fine_birds__5.safetensors'
    """
    readable = re.sub(r"[^\w.-]", "_", task)
    return f"tasks/{index + 1:04}-{readable}.safetensors"


@functools.lru_cache(maxsize=16)
def seeded_hash(seed: int, parts: tuple[Spec, ...]) -> str:
    """A hash of all the bits that a network's seeded factors are made of."""
    digest = hashlib.sha256(str(seed).encode())
    for spec in parts:
        if isinstance(spec, FactoredSpec):
            for part, length in (("U", spec.outputs), ("V", spec.inputs)):
                count = spec.rank.seeded * length
                digest.update(f"/{spec.name}/{part}/{count}/".encode())
                digest.update(seeds.sign_bits(seed, spec.name, part, count))
                digest.update(seeds.sign_scale(length).astype("<f4").tobytes())
    return digest.hexdigest()


def _known_buffers(names: list[str], parts: tuple[Spec, ...]) -> tuple[str, ...]:
    known = {name for spec in parts if isinstance(spec, DenseSpec) for name, _ in spec.tensors}
    for name in names:
        if name not in known:
            raise ValueError(f"it has no tensor {name!r} that its module could change")
    return tuple(names)


def _check_seeded(stored: dict[str, Any], seed: int, parts: tuple[Spec, ...]) -> None:
    generator = stored["generator"], stored["version"]
    if generator != (seeds.SIGNS_GENERATOR, seeds.SIGNS_VERSION):
        raise ValueError(f"its seeded factors come from an unknown generator, {generator}")
    if stored["sha256"] != seeded_hash(seed, parts):
        raise ValueError(
            f"seed {seed} does not give the seeded factors that the network was trained with"
        )


def _seal(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
