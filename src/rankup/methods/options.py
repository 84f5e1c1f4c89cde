"""What can be set about each method beside its recipe, each with its help text. No torch here: the
command line shows them before anything heavy is loaded."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin

from rankup.errors import RankupError


def option(
    default: Any, help: str, *, least: float | None = None, above: float | None = None
) -> Any:
    """A field with its help text, and for a number the least it may be or what it must exceed."""
    return field(default=default, metadata={"help": help, "least": least, "above": above})


@dataclass(frozen=True)
class Options:
    """A method's own settings; most have fields of their own."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value, least, above = (
                getattr(self, item.name),
                item.metadata["least"],
                item.metadata["above"],
            )
            if least is not None and not value >= least:
                raise RankupError(f"{item.name} must be at least {least}, got {value}")
            if above is not None and not value > above:
                raise RankupError(f"{item.name} must be more than {above}, got {value}")
            if get_origin(item.type) is Literal and value not in get_args(item.type):
                known = ", ".join(map(str, get_args(item.type)))
                raise RankupError(f"{item.name} must be one of {known}, got {value!r}")


@dataclass(frozen=True)
class IcarlOptions(Options):
    budget: int = option(2000, "Samples to remember in all, shared by the classes seen.", least=1)
    strength: float = option(1.0, "Weight of the method's own term of the loss.", least=0)


@dataclass(frozen=True)
class ReplayOptions(Options):
    memory: int = option(5, "Samples to remember of each class of each task.", least=1)
    replay: int = option(64, "Remembered samples that a step looks at.", least=1)


@dataclass(frozen=True)
class OrthogOptions(ReplayOptions):
    memory: int = option(5, "Samples to remember of each class of each task.", least=0)
    basis: Literal["orthogonal", "identity"] = option(
        "orthogonal", "Tasks' subspaces are columns of a random orthogonal matrix, or coordinates."
    )
    stiefel: Literal["auto", "yes", "no"] = option(
        "auto", "Keep weights orthonormal: yes, no, or where there are convolutions (auto)."
    )


@dataclass(frozen=True)
class ParallelOptions(Options):
    size: str = option("full", "What each network is: dense ('full'), or its rank (2, 4, …).")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size != "full" and not (str(self.size).isdecimal() and int(self.size)):
            raise RankupError(f"size must be a rank of at least 1 or 'full', got {self.size!r}")


@dataclass(frozen=True)
class MultitaskOptions(Options):
    single_head: bool = option(
        False, "One head over the classes of all tasks together, not one for each task."
    )
