"""The table of ablations: our recipes with one thing changed at a time."""

from collections.abc import Mapping
from typing import Any

from rankup.methods.settings import SEEDED, settings_for
from rankup.paper import paper_values
from rankup.paper.experiment import Experiment
from rankup.paper.ours import BEST, LONGER
from rankup.paper.tables import Row, Section, Table

_SEEDS = 2  # for all rows: "as it is" is in other tables, too, with more seeds

Changes = Mapping[str, Mapping[str, Any]]

# For the paper's method: how factors and selectors start, and how a task is trained.
_LEARNED: Changes = {
    "as it is": {},
    "first task's factors as long as others": {"first_factors": 0.0},
    "all factors of length 1": {"first_factors": 0.0, "factors": 1.0},
    "old selectors start at 0": {"selectors": "0"},
    "old selectors start at 0.3": {"selectors": "0.3"},
    "squared error": {"loss": "mse"},
    "constant rate, a tenth of the peak": {"schedule": "constant", "lr": 2e-3},
    "no weight decay": {"weight_decay": 0.0},
    "pixels from -1 to 1": {"pixels": "centred"},
    "5 epochs": {"epochs": 5},
}
# Learned factors have settings of their own: here they take those of seeded factors, to differ in
# nothing else.
_AS_SEEDED = {**settings_for("rank", "p-mnist", "mlp", variant=SEEDED).recipe, "first_factors": 0.0}
# At the width of all rivals.
_SEEDED_CIFAR = {"rank": "0,0", "seeded": "26624,5000", "store": "int8", "epochs": 30}
# For seeded factors: how many, in which layer, how stored; the rest as above.
_SEEDED: Changes = {
    "as it is": {},
    "full precision": {"store": "full"},
    "half precision": {"store": "float16"},
    "half as many factors": {"seeded": "6144,3000"},
    "a quarter": {"seeded": "3072,1500"},
    "an eighth": {"seeded": "1536,750"},
    "as many in both layers": {"seeded": "9144,9144"},
    "nearly all in the first layer": {"seeded": "16288,2000"},
    "a learned factor for each task, too": {"rank": "1,1"} | _AS_SEEDED,
    "selectors start afresh": {"selectors": "0"},
    "squared error": {"loss": "mse"},
    "constant rate, a tenth of the peak": {"schedule": "constant", "lr": 2e-3},
    "no weight decay": {"weight_decay": 0.0},
}
_IMAGES: Changes = {
    "as it is": {},
    "no crops": {"crop": 0},
    "no flips": {"flip": False},
    "neither": {"crop": 0, "flip": False},
    "no weight decay": {"weight_decay": 0.0},
    "selectors start afresh": {"selectors": "0"},
    "full precision": {"store": "full"},
    "a quarter of the factors": {"seeded": "6656,1250"},
    "width 1024, fewer factors": {"width": 1024, "seeded": "21504,4608"},
}


def ablation() -> Table:
    """Our recipes with one part changed at a time."""
    sections = [
        _section("p-mnist", "(11, 1)", LONGER["p-mnist"], _LEARNED),
        _section("p-mnist", "seeded", BEST["p-mnist", "mlp"] | {"epochs": 5}, _SEEDED),
        _section("s-cifar100", "seeded", _SEEDED_CIFAR, _IMAGES),
    ]
    differs = f"The first {_SEEDS} seeds of each, so that the same runs are compared."
    return Table("What each part of a recipe is worth", sections, differs)


def _section(stream: str, name: str, recipe: Mapping[str, Any], changes: Changes) -> Section:
    rows = []
    for what, changed in changes.items():
        seeds = {"seeds": _SEEDS} if changed else {}
        experiment = Experiment.of(stream, **{**recipe, **changed, **seeds})
        rows.append(Row(what, experiment, (None, None), seeds=_SEEDS))
    title = f"{paper_values.STREAMS[stream]}, {name}, {recipe['epochs']} epochs"
    return Section(title, ("accuracy", "parameters"), rows)
