"""The built-in methods: where each is, its help, options, recipe and tuning grid.

All tuning grids have the same number of trials, ours included. No torch here.
"""

from types import MappingProxyType

from rankup.methods.info import MethodInfo, axis
from rankup.methods.options import (
    DerOptions,
    EwcOptions,
    GpmOptions,
    HatOptions,
    IbpWfOptions,
    IcarlOptions,
    MultitaskOptions,
    NsclOptions,
    OrthogOptions,
    PackNetOptions,
    ParallelOptions,
    RandLoraOptions,
    RankOptions,
    ReplayOptions,
    SupSupOptions,
    VeraOptions,
    WsnOptions,
)

# For methods designed for plain gradient descent, with their authors' learning rate.
_SGD = MappingProxyType(
    {"optimiser": "sgd", "lr": 0.1, "schedule": "constant", "weight_decay": 0.0}
)
_SCALES = (axis("lr", 3e-3, 1e-2, 3e-2, 1e-1), axis("weight_decay", 0.0, 1e-2, 5e-2))
_REPLAY = (axis("lr", 0.01, 0.03, 0.1), axis("replay", 10, 64, 128, 256))

BUILTIN = {
    "rank": MethodInfo(
        "rank:RankUpdate",
        "a little rank and a selector per task: never forgets",
        RankOptions,
        open_ended=True,
        search=[
            axis("lr", 1e-2, 2e-2),
            axis("weight_decay", 0.0, 1e-2, 5e-2),
            axis("first_factors", 0.0, 8.0),
        ],
    ),
    "finetune": MethodInfo("finetune:FineTune", "one dense network trained on and on; forgets"),
    "ewc": MethodInfo(
        "ewc:EWC",
        "holds important weights where they were",
        EwcOptions,
        search=[axis("lr", 3e-4, 1e-3, 3e-3), axis("strength", 1e2, 1e3, 1e4, 1e5)],
    ),
    "icarl": MethodInfo(
        "icarl:ICaRL",
        "exemplars, distillation, and the nearest mean of exemplars",
        IcarlOptions,
        search=[axis("lr", 3e-4, 1e-3, 3e-3), axis("strength", 0.3, 1.0, 3.0, 10.0)],
    ),
    "agem": MethodInfo(
        "agem:AGEM",
        "no step that a batch of remembered samples would call harmful",
        ReplayOptions,
        recipe=_SGD,
        search=_REPLAY,
    ),
    "er-ring": MethodInfo(
        "er_ring:ERRing",
        "every step also on remembered samples, the last ones of each class",
        ReplayOptions,
        recipe=_SGD,
        search=_REPLAY,
    ),
    "der": MethodInfo(
        "der:DER",
        "remembered samples are answered as they were when they were learned",
        DerOptions,
        recipe=_SGD,
        search=[
            axis("lr", 0.01, 0.03, 0.1),
            axis("strength", 0.3, 1.0),
            axis("labels", 0.0, 0.5),
        ],
    ),
    "hat": MethodInfo(
        "hat:HardAttention",
        "learns which units a task uses and freezes them",
        HatOptions,
        search=[
            [{"optimiser": "sgd", "lr": 0.5}, *axis("lr", 3e-4, 1e-3, 3e-3)],
            axis("strength", 0.1, 0.75, 2.5),
        ],
    ),
    "packnet": MethodInfo(
        "packnet:PackNet",
        "prunes after every task, to give the rest to the next",
        PackNetOptions,
        search=[
            axis("lr", 1e-3, 3e-3, 1e-2),
            axis("weight_decay", 0.0, 1e-2),
            axis("retrain", 1 / 3, 1 / 2),
        ],
    ),
    "supsup": MethodInfo(
        "supsup:SupSup",
        "a mask per task over random weights; never forgets",
        SupSupOptions,
        search=[
            axis("lr", 3e-3, 1e-2, 3e-2),
            axis("weight_decay", 0.0, 1e-2),
            axis("share", 0.1, 0.3),
        ],
    ),
    "wsn": MethodInfo(
        "wsn:WSN",
        "a mask per task over shared weights, frozen once used; never forgets",
        WsnOptions,
        search=[axis("lr", 1e-3, 3e-3, 1e-2), axis("share", 0.05, 0.1, 0.3, 0.5)],
    ),
    "orthog": MethodInfo(
        "orthog:Orthog",
        "replay, and an orthogonal subspace of features for each task",
        OrthogOptions,
        recipe=_SGD,
        search=[
            axis("lr", 0.05, 0.1, 0.2),
            axis("basis", "orthogonal", "identity"),
            axis("stiefel", "yes", "no"),
        ],
    ),
    "nscl": MethodInfo(
        "nscl:NSCL",
        "moves weights where old inputs hold little",
        NsclOptions,
        search=[axis("lr", 3e-4, 1e-3, 3e-3), axis("energy", 0.01, 0.05, 0.1, 0.3)],
    ),
    "gpm": MethodInfo(
        "gpm:GPM",
        "no step within the spaces that old inputs span",
        GpmOptions,
        recipe=_SGD,
        search=[axis("lr", 0.01, 0.03, 0.1), axis("threshold", 0.9, 0.95, 0.97, 0.99)],
    ),
    "ibpwf": MethodInfo(
        "ibpwf:WeightFactors",
        "a selection of shared factors per task; never forgets",
        IbpWfOptions,
        search=[axis("lr", 1e-3, 3e-3), axis("alpha", 10.0, 20.0, 40.0), axis("keep", 0.4, 0.5)],
    ),
    "vera": MethodInfo(
        "vera:Vera",
        "scales of random matrices that all layers share: never forgets",
        VeraOptions,
        search=_SCALES,
    ),
    "randlora": MethodInfo(
        "randlora:RandLora",
        "scales of random blocks whose sum has full rank: never forgets",
        RandLoraOptions,
        search=_SCALES,
    ),
    "parallel": MethodInfo(
        "parallel:Parallel", "a network of its own for each task: never forgets", ParallelOptions
    ),
    "multitask": MethodInfo(
        "multitask:Multitask",
        "learns all tasks at once: a bound, not continual",
        MultitaskOptions,
        continual=False,
    ),
}
