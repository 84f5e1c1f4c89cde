"""Random generators that are derived from a seed and a name, and random numbers for seeded factors
that are the same on every machine."""

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

# For the global generators, from which modules draw in any thread.
_LOCK = threading.RLock()


def number(seed: int, *names: object) -> int:
    """Derive a seed for the purpose that the names describe."""
    digest = hashlib.sha256(repr((seed, *names)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(seed: int, *names: object, device: torch.device | str = "cpu") -> torch.Generator:
    """Make a generator for the purpose that the names describe, so that its draws do not depend on
    any others.

    >>> a, b = generator(0, "factors", "hidden.0", 3), generator(0, "factors", "hidden.0", 3)
    >>> torch.equal(torch.rand(2, generator=a), torch.rand(2, generator=b))
    True
    """
    return torch.Generator(device).manual_seed(number(seed, *names))


def epoch_generator(
    seed: int, task: int | str, epoch: int, device: torch.device
) -> torch.Generator:
    """Make the generator for all randomness in an epoch of a task, which is identified by its index
    or name."""
    return generator(seed, "epoch", task, epoch, device=device)


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    """Draw float32 numbers from the normal distribution, whatever torch's default dtype is."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=generator.device)


@contextmanager
def seeded_rng(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, the global generators are seeded: torch's for the CPU and the device, Python's and
    NumPy's. Afterwards their states are restored. Threads take turns."""
    with _LOCK:
        python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            with _seeded_torch(device, seed):
                yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002


def rng_states() -> tuple[object, ...]:
    """Return the states of all global generators, except those of GPUs."""
    legacy = pickle.dumps(np.random.get_state())  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), legacy


@contextmanager
def rng_restored_on_error(device: torch.device) -> Iterator[None]:
    """Restore the GPU's generator if the capture of a graph fails, because torch leaves it in the
    state of a capture, in which nothing can draw from it."""
    generator = _gpu_generator(device)
    before = generator.clone_state()
    try:
        yield
    except BaseException:
        generator.graphsafe_set_state(before)
        raise


def _gpu_generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


@contextmanager
def _seeded_torch(device: torch.device, seed: int) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        # `torch.manual_seed` would seed all devices.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            _gpu_generator(device).manual_seed(seed)
        yield


def sign_bits(seed: int, layer: str, part: str, count: int) -> bytes:
    """Generate `count` random bits for a layer's `U` or `V`, packed into bytes. By integer
    arithmetic alone, so that they are the same on every machine and for every version of every
    library. A larger count extends the bits of a smaller one.

    >>> sign_bits(0, "hidden.0", "U", 32).hex()
    '87095d36'
    """
    message = f"{SIGNS_GENERATOR}/{SIGNS_VERSION}/{seed}/{part}/{layer}".encode()
    return hashlib.shake_256(message).digest(math.ceil(count / 8))


def sign_scale(length: int) -> np.float32:
    """The absolute value of the entries of a seeded vector, for which the vector has length 1."""
    return np.float32(1.0 / math.sqrt(length))


def signs(seed: int, layer: str, part: str, rows: int, length: int, dtype: torch.dtype) -> Tensor:
    """Seeded vectors of random signs, `[rows, length]`: 1/√length for bit 1, −1/√length for 0.

    >>> signs(0, "hidden.0", "U", 2, 4, torch.float32)
    tensor([[ 0.5000, -0.5000, -0.5000, -0.5000],
            [-0.5000,  0.5000,  0.5000,  0.5000]])
    """
    count = rows * length
    packed = np.frombuffer(sign_bits(seed, layer, part, count), dtype=np.uint8)
    plus = torch.from_numpy(np.unpackbits(packed, count=count)).bool().view(rows, length)
    scale = torch.tensor(sign_scale(length), device="cpu").to(dtype)
    return torch.where(plus, scale, -scale)


def uniform(seed: int, layer: str, part: str, rows: int, length: int) -> Tensor:
    """Numbers from −1 to 1, `[rows, length]`, each made from 16 of the bits of `sign_bits`, so that
    they are the same on every machine. More rows extend those of fewer.

    >>> uniform(0, "vera", "A", 2, 3)
    tensor([[ 0.6369,  0.3710, -0.6847],
            [ 0.3410, -0.3140,  0.1525]])
    """
    count = rows * length
    whole = np.frombuffer(sign_bits(seed, layer, part, 16 * count), dtype="<u2")
    # The centres of 65,536 equal intervals, which are symmetric around 0 and exact in float32.
    odd = torch.from_numpy(whole.astype(np.float32)) * 2 - 65_535
    return (odd / 65_536).view(rows, length)
