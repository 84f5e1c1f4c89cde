"""Random generators, each made from one seed and a name; random signs for seeded factors."""

import hashlib
import math
import pickle
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

# Written into every network folder. A change to `sign_bits` or `signs` is a new version.
SIGNS_GENERATOR = "shake256-signs"
SIGNS_VERSION = 1

# The generators that modules draw from are the process's.
_ONE_AT_A_TIME = threading.RLock()


def number(seed: int, *names: object) -> int:
    """A seed of its own for every purpose."""
    digest = hashlib.sha256(repr((seed, *names)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(seed: int, *names: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of its own for every purpose: no draw depends on how many came before it.

    >>> a, b = generator(0, "factors", "hidden.0", 3), generator(0, "factors", "hidden.0", 3)
    >>> torch.equal(torch.rand(2, generator=a), torch.rand(2, generator=b))
    True
    """
    return torch.Generator(device).manual_seed(number(seed, *names))


def of_epoch(seed: int, task: int, epoch: int, device: torch.device) -> torch.Generator:
    """The generator for all randomness in an epoch of a task; both count from 0."""
    return generator(seed, "epoch", task, epoch, device=device)


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    """Normally distributed numbers, the same whatever torch's default dtype is."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=generator.device)


@contextmanager
def drawing(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, the generators that modules draw from start at the seed: torch's for the CPU and the
    device, Python's and NumPy's. Afterwards they are as before. Threads take turns."""
    with _ONE_AT_A_TIME:
        python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            with _drawing_of_torch(device, seed):
                yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002


def drawn_from() -> tuple[object, ...]:
    """The states of all generators that modules draw from, except a GPU's."""
    legacy = pickle.dumps(np.random.get_state())  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), legacy


@contextmanager
def kept_if_it_fails(device: torch.device) -> Iterator[None]:
    """Inside, a graph is captured. If that fails, torch leaves its generator for the GPU as if the
    capture went on, and nothing can draw from it any more: its former state is restored."""
    generator = _of_gpu(device)
    before = generator.clone_state()
    try:
        yield
    except BaseException:
        generator.graphsafe_set_state(before)
        raise


def _of_gpu(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


@contextmanager
def _drawing_of_torch(device: torch.device, seed: int) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        # Not `torch.manual_seed`, which seeds all devices there are.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            _of_gpu(device).manual_seed(seed)
        yield


def sign_bits(seed: int, layer: str, part: str, count: int) -> bytes:
    """`count` random bits of a layer's `U` or `V`, packed: integer arithmetic alone, so they are
    the same on every machine and for every version of every library. A larger
    count extends the bits of a smaller one.

    >>> sign_bits(0, "hidden.0", "U", 32).hex()
    '87095d36'
    """
    message = f"{SIGNS_GENERATOR}/{SIGNS_VERSION}/{seed}/{part}/{layer}".encode()
    return hashlib.shake_256(message).digest(math.ceil(count / 8))


def sign_scale(length: int) -> np.float32:
    """The size of every entry of a seeded vector, which gives the vector length 1."""
    return np.float32(1.0 / math.sqrt(length))


def signs(seed: int, layer: str, part: str, rows: int, length: int, dtype: torch.dtype) -> Tensor:
    """Seeded vectors as a `[rows, length]` tensor of ±1/√length; bit 1 is plus.

    >>> signs(0, "hidden.0", "U", 2, 4, torch.float32)
    tensor([[ 0.5000, -0.5000, -0.5000, -0.5000],
            [-0.5000,  0.5000,  0.5000,  0.5000]])
    """
    count = rows * length
    packed = np.frombuffer(sign_bits(seed, layer, part, count), dtype=np.uint8)
    plus = torch.from_numpy(np.unpackbits(packed, count=count)).bool().view(rows, length)
    scale = torch.tensor(sign_scale(length), device="cpu").to(dtype)
    return torch.where(plus, scale, -scale)
