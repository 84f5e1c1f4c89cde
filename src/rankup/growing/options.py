"""Options of `grow`, checked."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rankup.errors import RankupError
from rankup.layers.rounding import STORES, Store
from rankup.rank import RankRule, as_whole, is_match


@dataclass(frozen=True)
class GrowOptions:
    """The arguments of `grow`, checked."""

    rank: RankRule
    base: Literal["new", "keep"] = "new"
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    last: int | None = None
    head: str | None = None
    seed: int = 0
    store: Store = "full"
    # What a task's draws are seeded by: its name, or its number as in the first format version,
    # whose tasks always select from all before them.
    draws: Literal["name", "number"] = "name"

    def __post_init__(self) -> None:
        if self.base not in ("new", "keep"):
            raise RankupError(f"base must be 'new' or 'keep', got {self.base!r}")
        if self.store not in STORES:
            raise RankupError(f"store must be one of {', '.join(STORES)}, got {self.store!r}")
        for option, patterns in (("include", self.include or ()), ("exclude", self.exclude)):
            for pattern in patterns:
                if not isinstance(pattern, str):
                    raise RankupError(f"{option} takes names or name patterns, got {pattern!r}")
        object.__setattr__(self, "seed", as_whole("seed", self.seed))
        if self.last is not None:
            object.__setattr__(self, "last", as_whole("last", self.last))

    def chooses(self, name: str) -> bool:
        """Whether the layer of that name is to be factored."""
        included = self.include is None or _is_named(name, self.include)
        return included and not self.excludes(name)

    def excludes(self, name: str) -> bool:
        return _is_named(name, self.exclude)


def _is_named(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches the name or that of something that contains it."""
    parts = name.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(is_match(name, pattern) for pattern in patterns for name in names)
