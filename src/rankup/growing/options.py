"""Options of `grow`, checked."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from rankup.errors import RankupError
from rankup.growing.routing import RouterRule
from rankup.layers.rounding import STORES, Store
from rankup.rank import RankRule, as_whole, is_match, is_named

Vectors = Literal["per task", "shared"]


@dataclass(frozen=True)
class GrowOptions:
    """The arguments of `grow`, checked."""

    rank: RankRule
    base: Literal["new", "keep"] = "new"
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    last: int | None = None
    head: str | tuple[str, ...] | None = None  # "new" makes one
    seed: int = 0
    store: Store = "full"
    per_task: tuple[str, ...] = ()
    # What a task's draws are seeded by: its name, or its number as in the first format version,
    # whose tasks always select from all before them.
    draws: Literal["name", "number"] = "name"
    # What tasks learn, and what is kept of the module's large weights, if not in its own dtype.
    dtype: str | None = None
    base_dtype: str | None = None
    # Whether tasks have norms and biases of their own; with a kept base they may share the kept.
    vectors: Vectors = "per task"
    # What that says of batch norms with statistics; folders written before it left them per task.
    batch_norms: Vectors = "shared"
    router: RouterRule | None = None  # how tasks are guessed

    def __post_init__(self) -> None:
        if self.base not in ("new", "keep"):
            raise RankupError(f"base must be 'new' or 'keep', got {self.base!r}")
        for option in ("dtype", "base_dtype"):
            object.__setattr__(self, option, _dtype_name(option, getattr(self, option)))
        if self.base_dtype and self.base != "keep":
            raise RankupError("base_dtype is of the weights that are kept: it needs base='keep'")
        if self.vectors not in get_args(Vectors):
            raise RankupError(f"vectors must be 'per task' or 'shared', got {self.vectors!r}")
        if self.vectors == "shared" and self.base != "keep":
            raise RankupError("vectors='shared' are those that are kept: it needs base='keep'")
        if self.vectors == "per task":
            object.__setattr__(self, "batch_norms", "per task")
        if self.store not in STORES:
            raise RankupError(f"store must be one of {', '.join(STORES)}, got {self.store!r}")
        if self.base == "keep" and self.router is not None and self.router.patches:
            raise RankupError(
                "patches are features of images, but with base='keep' a router compares the base's "
                "features: leave out one of both"
            )
        options = {
            "include": self.include or (),
            "exclude": self.exclude,
            "per_task": self.per_task,
            "head": self.heads or (),
        }
        for option, patterns in options.items():
            for pattern in patterns:
                if not isinstance(pattern, str):
                    raise RankupError(f"{option} takes names or name patterns, got {pattern!r}")
        object.__setattr__(self, "seed", as_whole("seed", self.seed))
        if self.last is not None:
            object.__setattr__(self, "last", as_whole("last", self.last))

    @property
    def heads(self) -> tuple[str, ...] | None:
        return (self.head,) if isinstance(self.head, str) else self.head

    def chooses(self, name: str) -> bool:
        """Whether the layer of that name is to be factored."""
        return self.includes(name) and not self.excludes(name)

    def includes(self, name: str) -> bool:
        return self.include is None or is_named(name, self.include)

    def excludes(self, name: str) -> bool:
        return is_named(name, self.exclude)

    def names(self, parameter: str) -> bool:
        """Whether a parameter is included by a pattern that names it, not just its layer."""
        key = parameter.rpartition(".")[2]
        return any(
            is_match(parameter, pattern) and is_match(key, last)
            for pattern in self.include or ()
            if (last := pattern.rpartition(".")[2]) != "*"
        )

    def keeps_per_task(self, name: str) -> bool:
        return is_named(name, self.per_task)


def _dtype_name(option: str, given: object) -> str | None:
    name = str(given).removeprefix("torch.")
    dtype = getattr(torch, name, None)
    if given is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise RankupError(f"{option} takes a floating-point dtype of torch, got {given!r}")
    return None if given is None else name
