"""Options of methods besides their recipes, with their help texts.

No torch here: the command line shows them before anything heavy is loaded.
"""

from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_type_hints

from rankup.errors import RankupError
from rankup.training.recipe import Recipe, check_type


def option(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """A field of a method's options.

    Args:
        default: a number, a word, True or False.
        help: one sentence for the command line.
        least, above, most: bounds of a number; it must be larger than `above`.
    """
    bounds = {"least": least, "above": above, "most": most}
    return field(default=default, metadata={"help": help, **bounds})


@dataclass(frozen=True)
class Options:
    """A method's own settings: the base of a frozen dataclass whose fields are `option`s."""

    def __post_init__(self) -> None:
        for item in option_fields(type(self)):
            name, value = item.name, getattr(self, item.name)
            check_type(name, item.type, value)
            least, above, most = (item.metadata.get(key) for key in ("least", "above", "most"))
            if least is not None and not value >= least:
                raise RankupError(f"{name} must be at least {least}, got {value}")
            if above is not None and not value > above:
                raise RankupError(f"{name} must be more than {above}, got {value}")
            if most is not None and not value <= most:
                raise RankupError(f"{name} must be at most {most}, got {value}")


def option_fields(options: type[Options]) -> tuple["Field[Any]", ...]:
    """The fields of a class of options. Their types are resolved if they are names, as in a file
    with `from __future__ import annotations`."""
    items = fields(options)
    if any(isinstance(item.type, str) for item in items):
        hints = get_type_hints(options)
        for item in items:
            item.type = hints[item.name]
    return items


def check_options_class(method: str, options: type[Options]) -> None:
    """Raise an error for a class of options that the command line cannot offer."""
    if not (isinstance(options, type) and issubclass(options, Options) and is_dataclass(options)):
        raise RankupError(f"the options of {method} must be a dataclass derived from Options")
    recipe = {item.name for item in fields(Recipe)}
    for item in option_fields(options):
        if not isinstance(item.default, bool | int | float | str):
            raise RankupError(
                f"the option {item.name!r} of {method} must have a number, a word or a yes or no "
                f"as its default"
            )
        if item.name in recipe:
            raise RankupError(
                f"{item.name!r} is a field of every recipe: give this option of {method} another "
                "name, or override the recipe"
            )


@dataclass(frozen=True)
class RankOptions(Options):
    last: int = option(
        0,
        "Factor only this many last layers; the others are learned with the first task. "
        "0: all layers are factored.",
        least=0,
    )
    reuse: bool = option(True, "Let tasks select from factors of earlier tasks.")
    uses: Literal["all", "own"] = option(
        "all",
        "Tasks select from factors of all before them, or stand by themselves with their own: each "
        "then adds the first rank, and can be removed or joined.",
    )
    store: Literal["full", "float16", "int8"] = option(
        "full", "What a task's numbers are rounded to and stored as; fewer bits make smaller files."
    )
    prune: bool = option(
        False,
        "After learning keep the fewest selectors, factors, biases and weights of heads with which "
        "accuracy and loss on a held-out tenth of the training data stay the same; takes up to "
        "five more epochs.",
    )
    tolerance: float = option(
        1.0, "With --prune: how many standard errors worse is still the same.", least=0
    )
    router: str = option(
        "",
        "How the task of inputs is guessed: energy, mahalanobis, means, analytic or several with "
        "weights, such as energy,mahalanobis=0.1; analytic,patches for photographs. See "
        "docs/guessing.md.",
    )
    teacher: str = option(
        "",
        "Folder of a run that has learned these tasks; its answers are learned instead of labels.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tolerance != 1 and not self.prune:
            raise RankupError("tolerance says how far prune may go, which is not on")


@dataclass(frozen=True)
class EwcOptions(Options):
    strength: float = option(100.0, "Weight of the method's own term of the loss.", least=0)
    gamma: float = option(
        1.0, "Multiplier of the importance of earlier tasks when one is added.", least=0
    )
    samples: int = option(
        1024, "Training samples that a task's importances or spaces are computed from.", least=1
    )
    anchors: Literal["latest", "all"] = option(
        "latest", "Hold weights to where the latest task left them, or to where each task did."
    )


@dataclass(frozen=True)
class NsclOptions(Options):
    energy: float = option(
        0.1, "Share of its old inputs' energy that a layer may disregard.", least=0, most=1
    )


@dataclass(frozen=True)
class GpmOptions(Options):
    threshold: float = option(
        0.97,
        "Share of a layer's inputs' energy, with the first task, that is protected.",
        least=0,
        most=1,
    )
    rise: float = option(0.001, "How much that share grows with every task, up to 1.", least=0)
    samples: int = option(
        300, "Training samples that a task's importances or spaces are computed from.", least=1
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
class DerOptions(ReplayOptions):
    strength: float = option(0.3, "Weight of the method's own term of the loss.", least=0)
    labels: float = option(
        0.0, "Weight of the loss on remembered samples' labels; above 0 it is DER++.", least=0
    )
    among: Literal["own", "all"] = option(
        "own",
        "Classes that a sample is told apart from: its own task's, or those of all tasks so far, "
        "to be asked without being told the task.",
    )


@dataclass(frozen=True)
class SupSupOptions(Options):
    share: float = option(0.3, "Share of each layer's weights that a mask keeps.", above=0, most=1)


@dataclass(frozen=True)
class VeraOptions(Options):
    directions: int = option(
        1024,
        "Random directions that all layers share (r of the paper): a task stores one number for "
        "each in every layer, and one for each of its outputs.",
        least=1,
    )


@dataclass(frozen=True)
class RandLoraOptions(Options):
    block_rank: int = option(
        64,
        "Rank r of each random block; a layer has as many blocks as full rank takes, n = ⌈min(in, "
        "out) / r⌉, and a task stores n · (r + min(in, out)) numbers in it: less, the larger r is.",
        least=1,
    )


@dataclass(frozen=True)
class WsnOptions(Options):
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
