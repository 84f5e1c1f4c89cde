"""Ways to learn a stream: the rank update and its rivals. Each is one short file; `METHODS` lists
them without loading any."""

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from rankup.errors import RankupError
from rankup.methods.options import (
    EwcOptions,
    HatOptions,
    IbpWfOptions,
    IcarlOptions,
    MultitaskOptions,
    NsclOptions,
    Options,
    OrthogOptions,
    PackNetOptions,
    ParallelOptions,
    RankOptions,
    ReplayOptions,
    SupSupOptions,
)

if TYPE_CHECKING:
    from rankup.methods.base import Method


class MethodInfo(NamedTuple):
    home: str  # its file and class
    help: str  # in one line
    options: type[Options] = Options
    continual: bool = True  # sees tasks one after another; False for an upper bound
    open_ended: bool = False  # need not know at the start how many tasks there will be
    # Recipe fields that this method overrides, unless they are given on the command line.
    recipe: Mapping[str, Any] = MappingProxyType({})


# For methods designed for plain gradient descent, with their authors' learning rate.
_SGD = MappingProxyType(
    {"optimiser": "sgd", "lr": 0.1, "schedule": "constant", "weight_decay": 0.0}
)

# A new method adds its entry here, its options to options.py and its file beside this one.
METHODS = {
    "rank": MethodInfo(
        "rank:RankUpdate",
        "a little rank and a selector per task: never forgets",
        RankOptions,
        open_ended=True,
    ),
    "finetune": MethodInfo("finetune:FineTune", "one dense network trained on and on; forgets"),
    "ewc": MethodInfo("ewc:EWC", "holds important weights where they were", EwcOptions),
    "icarl": MethodInfo(
        "icarl:ICaRL", "exemplars, distillation, and the nearest mean of exemplars", IcarlOptions
    ),
    "agem": MethodInfo(
        "agem:AGEM",
        "no step that a batch of remembered samples would call harmful",
        ReplayOptions,
        recipe=_SGD,
    ),
    "er-ring": MethodInfo(
        "er_ring:ERRing",
        "every step also on remembered samples, the last ones of each class",
        ReplayOptions,
        recipe=_SGD,
    ),
    "hat": MethodInfo(
        "hat:HardAttention", "learns which units a task uses and freezes them", HatOptions
    ),
    "packnet": MethodInfo(
        "packnet:PackNet", "prunes after every task, to give the rest to the next", PackNetOptions
    ),
    "supsup": MethodInfo(
        "supsup:SupSup", "a mask per task over random weights; never forgets", SupSupOptions
    ),
    "orthog": MethodInfo(
        "orthog:Orthog",
        "replay, and an orthogonal subspace of features for each task",
        OrthogOptions,
        recipe=_SGD,
    ),
    "nscl": MethodInfo("nscl:NSCL", "moves weights where old inputs hold little", NsclOptions),
    "ibpwf": MethodInfo(
        "ibpwf:WeightFactors", "a selection of shared factors per task; never forgets", IbpWfOptions
    ),
    "parallel": MethodInfo(
        "parallel:Parallel",
        "a network of its own for each task: never forgets",
        ParallelOptions,
    ),
    "multitask": MethodInfo(
        "multitask:Multitask",
        "learns all tasks at once: a bound, not continual",
        MultitaskOptions,
        continual=False,
    ),
}


def method_info(name: str) -> MethodInfo:
    if name not in METHODS:
        raise RankupError(f"there is no method {name!r}, only {', '.join(METHODS)}")
    return METHODS[name]


def method_class(name: str) -> "type[Method]":
    """The class of a method.

    >>> method_class("rank").__name__
    'RankUpdate'
    """
    home, _, attribute = method_info(name).home.partition(":")
    found: type[Method] = getattr(import_module(f"rankup.methods.{home}"), attribute)
    return found


def method_options(name: str, given: Mapping[str, Any]) -> Options:
    """A method's options; those not given take their defaults.

    >>> method_options("finetune", {"strength": 3})
    Traceback (most recent call last):
    rankup.errors.RankupError: 'strength' is not an option of finetune, which has none of its own
    """
    kind = method_info(name).options
    own = [item.name for item in fields(kind)]
    for key in given:
        if key not in own:
            known = ", ".join(own) or "none of its own"
            raise RankupError(f"{key!r} is not an option of {name}, which has {known}")
    return kind(**given)
