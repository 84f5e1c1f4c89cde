"""Reading the files of a network folder. Each is checked before its tensors are used."""

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from errno import EFBIG
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from rankup import models, seeds
from rankup.errors import RankupError, StoreError
from rankup.growing.heads import NEW, with_new_head
from rankup.growing.names import folded
from rankup.growing.planner import make_plan
from rankup.layers import Tensors, pruned, rounding
from rankup.layers.pruned import Kept
from rankup.layers.rounding import Store
from rankup.layers.spec import Shapes, Spec, tensor_name
from rankup.net.moving import moved
from rankup.net.network import IncrementalNet
from rankup.net.routers.routing import Routing, TaskRow
from rankup.net.routers.sums import Sums
from rankup.net.stages import append
from rankup.net.tasks import TaskList
from rankup.storage.manifest import BASE, File, Manifest
from rankup.storage.routing import sums_of, taken_row
from rankup.utils.files import read_regular
from rankup.utils.hub import SCHEME, Address, in_one_sentence


def network_without_tasks(
    folder: Path, manifest: Manifest, module: nn.Module | None
) -> IncrementalNet:
    """Grow the network of a manifest anew, before any of its files is read.

    Args:
        folder: for errors.
        module: as for `load`; None to build the model that the manifest describes.
    """
    if module is None and manifest.model["model"] is None:
        raise StoreError(
            f"{folder} was grown from a module of your own, a {manifest.model['class']}: pass one "
            "like it with load(path, module=…)"
        )
    if module is None:
        with seeds.seeded_rng(torch.device("cpu"), 0):
            try:
                module = models.build(manifest.model).to(manifest.dtype)
            except RankupError as error:
                raise StoreError(f"{folder} cannot be loaded: {error}") from error
    misfit = f"the module does not fit the network in {folder}"
    try:
        if manifest.options.head == NEW:
            module = with_new_head(module)
        plan = make_plan(module, manifest.options)
        if plan.specs != manifest.specs:  # before layers are built, which may take much memory
            differing = {(s.name, s) for s in plan.specs} ^ {(s.name, s) for s in manifest.specs}
            where = folded(sorted({name for name, _ in differing}))
            note = models.version_note(manifest.model)
            raise RankupError(f"they differ in {where or 'the order of their layers'}{note}")
        net = IncrementalNet(module, manifest.options, plan)
    except RankupError as error:
        raise StoreError(f"{misfit}: {error}") from error
    if net.dtype != manifest.dtype:
        raise StoreError(f"{misfit}: it is in {net.dtype}, but the network is in {manifest.dtype}")
    found = type(net.body).__qualname__
    if (saved := manifest.model.get("class", found)) != found:
        warnings.warn(
            f"{folder} was grown from a {saved}, but the module is a {found}", stacklevel=3
        )
    return net


def base_path(folder: Path, base_from: str | None) -> Path:
    """The path of a network's base: in its folder; in another network's folder, absolute or
    relative to the first; or downloaded from the Hub, for `hf://user/name@revision`."""
    if base_from is None or (folder / BASE).exists():
        return folder / BASE
    if not base_from.startswith(SCHEME):
        return folder / base_from / BASE
    from huggingface_hub import hf_hub_download

    with in_one_sentence(f"the base of {folder}, {base_from}, cannot be had", StoreError):
        address = Address.parse(base_from)
        return Path(hf_hub_download(address.repository, BASE, revision=address.revision))


def read_base(folder: Path, manifest: Manifest) -> list[Tensors]:
    """The kept weights of each layer, empty where there are none."""
    shapes = [(spec, spec.base_shapes(), None) for spec in manifest.specs]
    if manifest.base is None:
        return [{} for _ in shapes]
    path = base_path(folder, manifest.base_from)
    tensors = read_checked(path, manifest.base)
    return _by_part(path, tensors, shapes, "full", manifest.kept_dtype)


def read_task(
    folder: Path, manifest: Manifest, known: TaskList, index: int
) -> tuple[list[Tensors], TaskRow | None]:
    """Read the file of the task of an index.

    Args:
        known: the manifest's tasks.

    Returns:
        The task's tensors for each layer, and its row for the router, if there is one.
    """
    task, file = manifest.tasks[index]
    place = known.place(task, index)
    shapes = [
        (spec, spec.shapes(place, task.rows), task.kept.get(spec.name)) for spec in manifest.specs
    ]
    path = folder / file.file
    content = read_content(path, file)
    header = _task_header(content)
    if manifest.version > 1 and not _is_of_task(header, known, index):
        raise StoreError(f"{path} holds another task than {task.name!r}: it says {header}")
    tensors = tensors_of(path, content)

    def dtype_of(spec: Spec, key: str) -> torch.dtype:
        return manifest.learned_dtype(spec)

    row = taken_row(path, tensors, manifest.options.router, task.name, task.classes)
    return _by_part(path, tensors, shapes, manifest.options.store, dtype_of), row


def read_sums(folder: Path, manifest: Manifest) -> Sums | None:
    """A router's sums over all tasks, if it has any."""
    if manifest.sums is None:
        return None
    path = folder / manifest.sums.file
    return sums_of(path, read_checked(path, manifest.sums), manifest.samples)


def append_tasks(
    net: IncrementalNet, folder: Path, manifest: Manifest, known: TaskList, indices: Sequence[int]
) -> None:
    """Read tasks of a folder and add them to a network.

    Args:
        known: the manifest's tasks.
        indices: of the tasks to add. The tasks that they use must be among them or in the network.
    """
    if not indices:
        return
    # All at once, because the network's tables are copied whenever tasks are added.
    read = [read_task(folder, manifest, known, index) for index in indices]
    found = zip(*(parts for parts, _ in read), strict=True)
    by_part = [[moved(own, net.device) for own in parts] for parts in found]
    rows = [row for _, row in read if row is not None]
    routing = _routing_after(net, folder, manifest, rows)
    tasks = net._tasks.following([known.explicit(index) for index in indices])
    append(net, tasks, by_part, routing)
    for index in indices:
        task, file = manifest.tasks[index]
        net.saved_files[task.name] = file


def _routing_after(
    net: IncrementalNet, folder: Path, manifest: Manifest, rows: Sequence[TaskRow]
) -> Routing | None:
    """A network's routing after tasks of a folder were added; None without a router.

    Args:
        rows: of the added tasks.
    """
    if net.routing is None:
        return None
    total = read_sums(folder, manifest)
    known = net.routing.total
    try:
        if total is not None and known is not None:
            total = total - known
        return net.routing.appended(rows, total)
    except (RankupError, ValueError) as error:
        raise StoreError(f"the router of {folder} does not fit its tasks: {error}") from error


def _task_header(content: bytes) -> object:
    """The description of the task in the metadata of its file; None if there is none."""
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return json.loads(header["__metadata__"]["task"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def _is_of_task(header: object, known: TaskList, index: int) -> bool:
    """Whether a file's description is that of a task. Files never change, so its `uses` may name
    tasks that were removed since, which is possible if they add no factors; these are ignored."""
    if not isinstance(header, dict) or not isinstance(header.get("uses"), list):
        return False
    left = [name for name in header["uses"] if name in known.names]
    return {**header, "uses": left} == known.explicit(index).said()


def _by_part(
    path: Path,
    tensors: Tensors,
    expected: Sequence[tuple[Spec, Shapes, Kept | None]],
    form: Store,
    dtype_of: Callable[[Spec, str], torch.dtype],
) -> list[Tensors]:
    """Divide a file's tensors among the layers, checking them.

    Args:
        path: for errors.
        tensors: of the file, which are removed as they are taken.
        expected: for each layer its spec, the shapes of its tensors, and how many numbers of each a
            task kept, if it may have pruned any.
        form: in which tensors are stored.
        dtype_of: the dtype of a tensor once it is unpacked.
    """
    parts = [
        part_of(path, tensors, spec, shapes, kept, form, {k: dtype_of(spec, k) for k in shapes})
        for spec, shapes, kept in expected
    ]
    if tensors:
        raise StoreError(
            f"{path} holds tensors that the network has no place for: {', '.join(tensors)}"
        )
    return parts


def part_of(
    path: Path,
    tensors: Tensors,
    spec: Spec,
    shapes: Shapes,
    kept: Kept | None,
    form: Store,
    dtypes: Mapping[str, torch.dtype],
) -> Tensors:
    """Take a layer's tensors out of those of a file, checking and unpacking them. Arguments are
    those of `_by_part` for one layer; `dtypes` are by the tensors' names."""
    part, masks = Tensors(), Tensors()
    for key, shape in shapes.items():
        if kept is not None:
            masks[key] = _mask(path, tensors, spec, key, shape, kept, masks)
        packed: Tensors = {}
        for own, layout in rounding.layouts(spec, key, shape, form, dtypes[key]).items():
            name, mask, stored = tensor_name(spec, own), masks.get(key), layout.shape
            if name not in tensors:
                raise StoreError(f"{path} has no tensor {name!r}")
            if mask is not None and pruned.covers(mask, stored) and not mask.all():
                stored = int(mask.sum()), *stored[mask.dim() :]
            tensor = tensors.pop(name)
            if tensor.shape != stored:
                raise StoreError(f"{path}: {name!r} is {list(tensor.shape)}, not {list(stored)}")
            if layout.dtypes is not None and tensor.dtype not in layout.dtypes:
                allowed = " or ".join(map(str, layout.dtypes))
                raise StoreError(f"{path}: {name!r} is {tensor.dtype}, not {allowed}")
            if stored != layout.shape and mask is not None:
                tensor = pruned.restored(tensor, mask, layout.shape)
            packed[own] = tensor
        part[key] = rounding.unpack(spec, key, packed, dtypes[key])
    return part


def _mask(
    path: Path,
    tensors: Tensors,
    spec: Spec,
    key: str,
    shape: tuple[int, ...],
    kept: Kept,
    known: Tensors,
) -> Tensor:
    """Which numbers of a tensor a task kept, as a bool tensor of that shape. If it pruned any, the
    file has them as bits, except for U and V, whose masks follow from the selector's in `known`."""
    name, wanted = tensor_name(spec, key + pruned.KEPT), kept["U" if key == "V" else key]
    mask = torch.ones(shape, dtype=torch.bool)
    if key in pruned.OWN:
        mask = pruned.of_own(known["selector"], shape[0])
    elif wanted < mask.numel():
        if name not in tensors:
            raise StoreError(f"{path} has no tensor {name!r}")
        try:
            mask = pruned.from_bits(tensors.pop(name), shape)
        except ValueError as error:
            raise StoreError(f"{path}: {name!r} is of {error}") from error
    if int(mask.sum()) != wanted:
        raise StoreError(f"{path}: {name!r} does not keep {wanted} of {key}")
    return mask


def read_checked(path: Path, file: File) -> Tensors:
    """The tensors of a file, whose hash is checked."""
    return tensors_of(path, read_content(path, file))


def read_content(path: Path, file: File) -> bytes:
    """The bytes of a file, whose size and hash are checked."""
    try:
        content = read_regular(path, file.size)
    except FileNotFoundError:
        raise StoreError(f"{path} is missing") from None
    except OSError as error:
        what = "is not the file that was saved" if error.errno == EFBIG else "cannot be read"
        raise StoreError(f"{path} {what}: {error.strerror}") from error
    if len(content) < file.size:
        raise StoreError(f"{path} is truncated: {len(content)} of {file.size} bytes are left")
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise StoreError(f"{path} is not the file that was saved: its SHA-256 has changed")
    return content


def tensors_of(path: Path, content: bytes) -> Tensors:
    """The tensors in the content of a safetensors file."""
    try:
        return safetensors.torch.load(content)
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise StoreError(f"{path} is not a safetensors file: {reason}") from error
