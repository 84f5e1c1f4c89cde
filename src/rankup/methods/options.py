"""What can be set about each method beside its recipe, each with its help text. No torch here: the
command line shows them before anything heavy is loaded."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin

from rankup.errors import RankupError


def option(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """A field with its help text, and for a number the least and most it may be or what it must
    exceed."""
    bounds = {"least": least, "above": above, "most": most}
    return field(default=default, metadata={"help": help, **bounds})


@dataclass(frozen=True)
class Options:
    """A method's own settings; most have fields of their own."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            least, above, most = (item.metadata[key] for key in ("least", "above", "most"))
            if least is not None and not value >= least:
                raise RankupError(f"{item.name} must be at least {least}, got {value}")
            if above is not None and not value > above:
                raise RankupError(f"{item.name} must be more than {above}, got {value}")
            if most is not None and not value <= most:
                raise RankupError(f"{item.name} must be at most {most}, got {value}")
            if get_origin(item.type) is Literal and value not in get_args(item.type):
                known = ", ".join(map(str, get_args(item.type)))
                raise RankupError(f"{item.name} must be one of {known}, got {value!r}")


@dataclass(frozen=True)
class HatOptions(Options):
    strength: float = option(0.75, "Price of units that no earlier task uses.", least=0)
    s_max: float = option(400.0, "Slope of the gates at the end of every epoch.", least=1)


@dataclass(frozen=True)
class PackNetOptions(Options):
    retrain: float = option(0.5, "Share of the epochs after pruning.", least=0, most=1)
