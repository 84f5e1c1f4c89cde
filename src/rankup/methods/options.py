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
class EwcOptions(Options):
    strength: float = option(100.0, "Weight of the method's own term of the loss.", least=0)
    gamma: float = option(
        1.0, "Factor on the importance of earlier tasks whenever one is added.", least=0
    )
    samples: int = option(1024, "Training samples behind a task's importances.", least=1)
    anchors: Literal["latest", "all"] = option(
        "latest", "Weights are held to where the latest task left them, or to where each one did."
    )


@dataclass(frozen=True)
class NsclOptions(Options):
    energy: float = option(
        0.1, "Share of its old inputs' energy to which a layer is not bound.", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.energy > 1:
            raise RankupError(f"energy must be at most 1, got {self.energy}")


@dataclass(frozen=True)
class IcarlOptions(Options):
    budget: int = option(2000, "Samples to remember in all, shared by the classes seen.", least=1)
    strength: float = option(1.0, "Weight of the method's own term of the loss.", least=0)


@dataclass(frozen=True)
class ReplayOptions(Options):
    memory: int = option(5, "Samples to remember of each class of each task.", least=1)
    replay: int = option(64, "Remembered samples that a step looks at.", least=1)
