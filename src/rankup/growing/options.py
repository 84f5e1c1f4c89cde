"""Options of `grow`, checked."""

from dataclasses import dataclass
from typing import Literal

from rankup.errors import RankupError
from rankup.growing.routing import RouterRule
from rankup.layers.rounding import STORES, Store
from rankup.rank import RankRule, as_whole, is_match, is_named


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
    router: RouterRule | None = None  # how tasks are guessed

    def __post_init__(self) -> None:
        if self.base not in ("new", "keep"):
            raise RankupError(f"base must be 'new' or 'keep', got {self.base!r}")
        if self.store not in STORES:
            raise RankupError(f"store must be one of {', '.join(STORES)}, got {self.store!r}")
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
