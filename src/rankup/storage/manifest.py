"""The manifest of a network folder: what the network is, its tasks in order and every file's
SHA-256. It holds no times, hosts or paths, so equal networks have equal manifests."""

import functools
import hashlib
import json
import os
import re
import reprlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rankup import models, rank, seeds
from rankup.data.inputs import Input
from rankup.data.inputs import from_json as from_json_input
from rankup.errors import RankupError, StoreError
from rankup.growing.options import GrowOptions
from rankup.growing.routing import RouterRule
from rankup.layers import name_of, pruned
from rankup.layers.spec import (
    DenseSpec,
    FactoredSpec,
    HeadSpec,
    Spec,
    check_parts,
    from_json,
    kept_dtype,
    learned_dtype,
    to_json,
)
from rankup.net.about import About, check_about
from rankup.net.tasks import KnownTask, TaskList, checked_name
from rankup.storage.atomic import json_bytes
from rankup.storage.schema import check_manifest
from rankup.storage.seal import seal
from rankup.utils.files import read_regular

FORMAT = "rankup network"
# The format version of new networks. Networks of version 1 are read, and saved as version 1 again:
# there every task selects from all earlier ones and draws its random numbers by its index.
VERSION = 2
METHOD_FORMAT = "rankup method"
_FORMATS = {FORMAT: "a rankup network", METHOD_FORMAT: "a method's weights"}
MANIFEST = "manifest.json"
BASE = "base.safetensors"
SUMS_FILE = r"sums-[0-9a-f]{8}\.safetensors"  # named after the hash of its content
MOST_MEMORY = 1 << 32  # default for the bytes that a network may take beyond its files

_LARGEST = 1 << 26  # bytes of a manifest


@dataclass(frozen=True)
class File:
    """A file's name in the folder, and the size and hash that it was written with."""

    file: str
    size: int
    sha256: str

    @classmethod
    def of(cls, name: str, content: bytes) -> "File":
        return cls(name, len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True)
class Manifest:
    """What a network folder holds.

    Attributes:
        model: the description by `rankup.models.describe`.
        dtype: of the network.
        options: that it was grown with.
        specs: its layers.
        base: the file of the kept weights; None if none are kept.
        tasks: in order, each with its file.
        updating: dense buffers that their modules would change by themselves.
        inputs: how inputs are prepared, unless a task says otherwise.
        base_from: where the base lies, if not in the folder.
        sums: the file of a router's sums over all tasks, if it has any.
        samples: the number of samples in these sums.
    """

    model: dict[str, Any]
    dtype: torch.dtype
    options: GrowOptions
    specs: tuple[Spec, ...]
    base: File | None
    tasks: tuple[tuple[KnownTask, File], ...]
    updating: tuple[str, ...] = ()
    inputs: Input | None = None
    base_from: str | None = None
    sums: File | None = None
    samples: int = 0

    @property
    def version(self) -> int:
        return 1 if self.options.draws == "number" else VERSION

    def task_list(self) -> TaskList:
        known = TaskList()
        for task, _ in self.tasks:
            known.append(task)
        return known

    def is_of_same_network(self, other: "Manifest") -> bool:
        """Whether both describe the same network, whatever tasks it has learned or removed."""
        if not models.are_alike(self.model, other.model):
            return False
        changing: dict[str, Any] = {"tasks": (), "updating": (), "inputs": None, "base_from": None}
        changing |= {"sums": None, "samples": 0}
        same = replace(other, model=self.model, **changing)
        return replace(self, **changing) == same

    def to_bytes(self) -> bytes:
        options = {**vars(self.options), "rank": rank.rule_to_json(self.options.rank)}
        # Options that came later are written only if they are not the default, so that the
        # manifests of older networks stay as they are.
        if not self.options.per_task:
            del options["per_task"]
        for option in ("dtype", "base_dtype"):
            if options[option] is None:
                del options[option]
        for option in ("vectors", "batch_norms"):
            if options[option] == "per task":
                del options[option]
        del options["draws"]  # follows from the version
        router = options.pop("router")
        options |= {} if router is None else {"router": str(router)}
        data = {
            "format": FORMAT,
            "version": self.version,
            "model": self.model,
            "dtype": str(self.dtype).removeprefix("torch."),
            "growth": options,
            "parts": [to_json(spec) for spec in self.specs],
            "seeded": {
                "generator": seeds.SIGNS_GENERATOR,
                "version": seeds.SIGNS_VERSION,
                "sha256": seeded_hash(self.options.seed, self.specs),
            },
            "base": self._base_to_json(),
            **({"sums": asdict(self.sums) | {"samples": self.samples}} if self.sums else {}),
            "tasks": [self._task_to_json(task) | asdict(file) for task, file in self.tasks],
            **({"updating": list(self.updating)} if self.updating else {}),
            **({"inputs": self.inputs.to_json()} if self.inputs and self.version > 1 else {}),
        }
        sealed = {**data, "sha256": seal(data)}
        return json_bytes(sealed)

    def _base_to_json(self) -> dict[str, Any] | None:
        if self.base is None:
            return None
        return asdict(self.base) | ({"from": self.base_from} if self.base_from else {})

    def _task_to_json(self, task: KnownTask) -> dict[str, Any]:
        data = {"name": task.name, "classes": task.classes}
        if self.version == 1:
            return data
        uses = "all" if task.uses is None else list(task.uses)
        data |= {"uses": uses, "about": task.about.to_json()}
        data |= {"views": task.views} if task.views > 1 else {}
        return data | ({"kept": task.kept} if task.kept else {})

    @classmethod
    def read(cls, folder: Path, most_memory: int = MOST_MEMORY) -> "Manifest":
        """Read and check a folder's manifest.

        Args:
            most_memory: bytes that the network may take beyond what its files hold.
        """
        path = folder / MANIFEST
        try:
            content = read_regular(path, _LARGEST)
        except (FileNotFoundError, NotADirectoryError):
            inside = next(filter(is_of_network, sorted(folder.glob("*"))), None)
            hint = f"; there is one in {inside}" if inside else ""
            raise StoreError(
                f"there is no network in {folder}: it has no {MANIFEST}{hint}"
            ) from None
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        data = open_manifest(path, content, FORMAT, VERSION)
        try:
            check_manifest(data, "")
            manifest = cls._from_json(data)
            manifest._check(data["seeded"], most_memory)
        except (RankupError, ValueError) as error:
            raise StoreError(f"{path} is not a valid manifest: {error}") from error
        return manifest

    @classmethod
    def _from_json(cls, data: dict[str, Any]) -> "Manifest":
        given = data["growth"]
        options = GrowOptions(
            rank=rank.rule_from_json(given["rank"]),
            base=given["base"],
            include=None if given["include"] is None else tuple(given["include"]),
            exclude=tuple(given["exclude"]),
            last=given["last"],
            head=tuple(given["head"]) if isinstance(given["head"], list) else given["head"],
            seed=given["seed"],
            store=given.get("store", "full"),
            per_task=tuple(given.get("per_task", ())),
            router=RouterRule.parse(given["router"]) if "router" in given else None,
            draws="number" if data["version"] == 1 else "name",
            dtype=given.get("dtype"),
            base_dtype=given.get("base_dtype"),
            vectors=given.get("vectors", "per task"),
            batch_norms=given.get("batch_norms", "per task"),
        )
        parts = tuple(from_json(part) for part in data["parts"])
        tasks: list[tuple[KnownTask, File]] = []
        known: set[str] = set()
        for index, entry in enumerate(data["tasks"]):
            if data["version"] == 1 and entry.keys() & {"uses", "about", "views"}:
                raise ValueError("its version has tasks that neither use others nor say anything")
            task = _task_from_json(entry, known)
            # The file's name follows from the task: no manifest can point outside its folder.
            if entry["file"] != task_file(index, task.name, data["version"]):
                raise ValueError(
                    f"task {index + 1} is {task.name!r}, so its file cannot be {entry['file']!r}"
                )
            known.add(task.name)
            tasks.append((task, File(entry["file"], entry["size"], entry["sha256"])))
        return cls(
            data["model"],
            getattr(torch, data["dtype"]),
            options,
            parts,
            File(BASE, data["base"]["size"], data["base"]["sha256"]) if data["base"] else None,
            tuple(tasks),
            tuple(data.get("updating", [])),
            from_json_input(data["inputs"]) if "inputs" in data else None,
            (data["base"] or {}).get("from"),
            *_sums_from_json(data.get("sums")),
        )

    def _check(self, seeded: dict[str, Any], most_memory: int) -> None:
        """Raise `ValueError` if entries contradict each other or would take too much memory."""
        check_parts(self.specs)
        if (self.base is None) != (self.options.base == "new"):
            raise ValueError(f"its base is {self.options.base!r}, but base.safetensors says else")
        router = self.options.router
        has_sums = router is not None and "analytic" in router.names and not router.apart
        if (self.sums is not None) != (has_sums and bool(self.tasks)):
            raise ValueError(f"its router is {router}, but its sums say else")
        known = {
            name for spec in self.specs if isinstance(spec, DenseSpec) for name, _ in spec.tensors
        }
        for name in self.updating:
            if name not in known:
                raise ValueError(f"it has no tensor {name!r} that its module could change")
        self._check_kept()
        if (needed := self.memory()) > most_memory:
            raise ValueError(
                f"the network would take {needed:,} bytes of memory beyond what its files hold, "
                f"more than {most_memory:,}: allow more with most_memory if you trust it"
            )
        generator = seeded["generator"], seeded["version"]
        if generator != (seeds.SIGNS_GENERATOR, seeds.SIGNS_VERSION):
            raise ValueError(f"its seeded factors come from an unknown generator, {generator}")
        if seeded["sha256"] != seeded_hash(self.options.seed, self.specs):
            raise ValueError(
                f"seed {self.options.seed} does not give the seeded factors that the network was "
                "trained with"
            )

    def _check_kept(self) -> None:
        """Raise `ValueError` unless every task says how many numbers of each pruned tensor it
        keeps, and has as many."""
        specs = [spec for spec in self.specs if pruned.keys_of(spec)]
        known = self.task_list()
        for index, task in enumerate(known.tasks):
            if task.kept.keys() != {spec.name for spec in specs}:
                raise ValueError(f"task {task.name!r} must say what it keeps of each such layer")
            place = known.place(task, index)
            for spec in specs:
                kept, most = task.kept[spec.name], pruned.most_of(spec, place, task.rows)
                if kept.keys() != most.keys() or any(kept[key] > most[key] for key in most):
                    raise ValueError(f"task {task.name!r} has no such numbers of {spec.name!r}")

    def memory(self) -> int:
        """Bytes that the network takes beyond what its files hold: seeded factors, pruned ones,
        tables padded to the last task's rank, and the initial weights of a model that is built
        before its files are read."""
        count = models.parameter_count(self.model)
        roots = self.task_list().root_count()
        for spec in self.specs:
            if isinstance(spec, FactoredSpec):
                count += spec.rank.seeded * (spec.inputs + spec.outputs)
                # The table of selectors has a row for each task and a column for each factor.
                others = spec.rank.step * (len(self.tasks) - roots)
                factors = spec.rank.seeded + spec.rank.first * roots + others
                count += len(self.tasks) * factors
                if spec.rank.prune:
                    count += (factors - spec.rank.seeded) * (spec.inputs + spec.outputs)
                    count += len(self.tasks) * spec.outputs
            elif isinstance(spec, HeadSpec):
                rows = [task.rows for task, _ in self.tasks]
                count += len(rows) * max(rows, default=0)
                count += sum(rows) * (spec.inputs + 1) * spec.prune
        widest = max(self.learned_dtype(spec).itemsize for spec in self.specs)
        return count * max(widest, self.dtype.itemsize)

    def learned_dtype(self, spec: Spec) -> torch.dtype:
        """The dtype of the tensors that a task adds to a layer."""
        dtype: torch.dtype = getattr(torch, learned_dtype(spec, name_of(self.dtype)))
        return dtype

    def kept_dtype(self, spec: Spec, key: str) -> torch.dtype:
        """The dtype of a tensor of the base."""
        dtype: torch.dtype = getattr(torch, kept_dtype(spec, key, name_of(self.dtype)))
        return dtype


def open_manifest(path: Path, content: bytes, format: str, version: int) -> dict[str, Any]:
    """Parse a manifest and check its format, version and seal; returns its entries without the
    seal.

    Args:
        path: of the file, for errors.
        content: of the file.
        format: the format that it must have.
        version: the newest version that can be read.
    """
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        raise StoreError(f"{path} is truncated or edited: it is not JSON") from None
    found = data.get("format") if isinstance(data, dict) else None
    if found != format:
        but = next((f", but of {kind}" for known, kind in _FORMATS.items() if found == known), "")
        raise StoreError(f"{path} is not the manifest of {_FORMATS[format]}{but}")
    given = data.get("version")
    if type(given) is not int or not 1 <= given <= version:
        readable = "version 1" if version == 1 else f"versions 1 to {version}"
        raise StoreError(
            f"{path} has format version {reprlib.repr(given)}, but this rankup reads {readable}: "
            "it was written by a newer rankup"
        )
    if data.pop("sha256", None) != seal(data):
        raise StoreError(f"{path} was edited: it does not match its own SHA-256")
    return dict(data)


def format_of(folder: Path) -> object:
    """The `format` entry of a folder's manifest; None if it cannot be read."""
    try:
        data = json.loads(read_regular(folder / MANIFEST, _LARGEST))
    except (OSError, ValueError, RecursionError):
        return None
    return data.get("format") if isinstance(data, dict) else None


def is_of_network(folder: Path) -> bool:
    """Whether a folder has a manifest other than one of a method's weights. It may be broken:
    `Manifest.read` then says how."""
    return os.path.lexists(folder / MANIFEST) and format_of(folder) != METHOD_FORMAT


def task_file(index: int, task: str, version: int = VERSION) -> str:
    """The name of a task's file. It depends on the task's name alone, since tasks can move from one
    network to another; in format version 1 it began with the task's number.

    >>> task_file(0, "fine birds: 5")
    'tasks/fine_birds__5-6ef7e28c.safetensors'
    >>> task_file(0, "fine birds: 5", version=1)
    'tasks/0001-fine_birds__5.safetensors'
    """
    readable = re.sub(r"[^\w.-]", "_", task)
    if version == 1:
        return f"tasks/{index + 1:04}-{readable}.safetensors"
    # Different names may be equally readable, and some file systems ignore case.
    return f"tasks/{readable}-{hashlib.sha256(task.encode()).hexdigest()[:8]}.safetensors"


def _task_from_json(entry: dict[str, Any], known: set[str]) -> KnownTask:
    name, uses = checked_name(entry["name"], known), entry.get("uses", "all")
    if uses == "all":
        uses = None
    elif not {*uses} <= known or len({*uses}) < len(uses):
        raise ValueError(f"task {name!r} uses tasks that are not before it, or one twice")
    about = About.from_json(entry.get("about", {}))
    check_about(name, entry["classes"], about)
    used = None if uses is None else tuple(uses)
    more = {"views": entry.get("views", 1), "kept": entry.get("kept", {})}
    return KnownTask(name, entry["classes"], used, about, **more)


def _sums_from_json(entry: dict[str, Any] | None) -> tuple[File | None, int]:
    if entry is None:
        return None, 0
    if not re.fullmatch(SUMS_FILE, entry["file"]):
        raise ValueError(f"a router's sums cannot be in {entry['file']!r}")
    return File(entry["file"], entry["size"], entry["sha256"]), entry["samples"]


@functools.lru_cache(maxsize=16)
def seeded_hash(seed: int, parts: tuple[Spec, ...]) -> str:
    """The SHA-256 of the signs and scales of all seeded factors."""
    digest = hashlib.sha256(str(seed).encode())
    for spec in parts:
        if isinstance(spec, FactoredSpec):
            for part, length in (("U", spec.outputs), ("V", spec.inputs)):
                count = spec.rank.seeded * length
                digest.update(f"/{spec.name}/{part}/{count}/".encode())
                digest.update(seeds.sign_bits(seed, spec.name, part, count))
                digest.update(seeds.sign_scale(length).astype("<f4").tobytes())
    return digest.hexdigest()
