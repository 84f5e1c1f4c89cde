"""The options of each method besides its recipe, with their help texts. No torch here: the command
line shows them before anything heavy is loaded."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from rankup.errors import RankupError
from rankup.training.recipe import check_type


def option(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """A field with its help text, and for a number its bounds: least, most, or what it must
    exceed."""
    bounds = {"least": least, "above": above, "most": most}
    return field(default=default, metadata={"help": help, **bounds})


@dataclass(frozen=True)
class Options:
    """A method's own settings; most have fields of their own."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            check_type(item.name, item.type, value)
            least, above, most = (item.metadata[key] for key in ("least", "above", "most"))
            if least is not None and not value >= least:
                raise RankupError(f"{item.name} must be at least {least}, got {value}")
            if above is not None and not value > above:
                raise RankupError(f"{item.name} must be more than {above}, got {value}")
            if most is not None and not value <= most:
                raise RankupError(f"{item.name} must be at most {most}, got {value}")


@dataclass(frozen=True)
class RankOptions(Options):
    last: int = option(
        0,
        "Factor only this many last layers; the others are learned with the first task. "
        "0: all layers are factored.",
        least=0,
    )
    reuse: bool = option(True, "Let tasks select from factors of earlier tasks.")
    store: Literal["full", "float16", "int8"] = option(
        "full", "What a task's numbers are rounded to and stored as; fewer bits make smaller files."
    )
    teacher: str = option(
        "",
        "Folder of a run that has learned these tasks; its answers are learned instead of labels.",
    )


@dataclass(frozen=True)
class EwcOptions(Options):
    strength: float = option(100.0, "Weight of the method's own term of the loss.", least=0)
    gamma: float = option(
        1.0, "Multiplier of the importance of earlier tasks when one is added.", least=0
    )
    samples: int = option(1024, "Training samples to compute a task's importances from.", least=1)
    anchors: Literal["latest", "all"] = option(
        "latest", "Hold weights to where the latest task left them, or to where each task did."
    )


@dataclass(frozen=True)
class NsclOptions(Options):
    energy: float = option(
        0.1, "Share of its old inputs' energy that a layer may disregard.", least=0, most=1
    )


@dataclass(frozen=True)
class IcarlOptions(Options):
    budget: int = option(2000, "Samples to remember in total, shared by the classes seen.", least=1)
    strength: float = option(1.0, "Weight of the method's own term of the loss.", least=0)


@dataclass(frozen=True)
class ReplayOptions(Options):
    memory: int = option(5, "Samples to remember of each class of each task.", least=1)
    replay: int = option(64, "Remembered samples used in each step.", least=1)


@dataclass(frozen=True)
class SupSupOptions(Options):
    share: float = option(0.3, "Share of each layer's weights that a mask keeps.", above=0, most=1)


@dataclass(frozen=True)
class IbpWfOptions(Options):
    dictionary: int = option(256, "Factors in each layer's dictionary.", least=1)
    alpha: float = option(20.0, "Factors that the prior expects a task to select.", above=0)
    keep: float = option(
        0.5, "Probability from which a factor is selected for good.", above=0, most=1
    )
    temperature: float = option(2 / 3, "How soft selections are while they are learned.", above=0)


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
    size: str = option("full", "What each network is: dense ('full') or of a rank (2, 4, …).")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size != "full" and not (str(self.size).isdecimal() and int(self.size)):
            raise RankupError(f"size must be a rank of at least 1 or 'full', got {self.size!r}")


@dataclass(frozen=True)
class MultitaskOptions(Options):
    single_head: bool = option(
        False, "One head over the classes of all tasks, instead of one for each task."
    )


@dataclass(frozen=True)
class HatOptions(Options):
    strength: float = option(0.75, "Weight of the method's own term of the loss.", least=0)
    s_max: float = option(400.0, "Slope of the gates at the end of every epoch.", least=1)


@dataclass(frozen=True)
class PackNetOptions(Options):
    retrain: float = option(0.5, "Share of the epochs after pruning.", least=0, most=1)
