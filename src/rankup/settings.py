"""What each method is run with where nothing else is asked for."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rankup.methods import method_info


class Settings(NamedTuple):
    recipe: Mapping[str, Any]  # fields that differ from the recipe of the stream and the network
    options: Mapping[str, Any]  # the method's own that differ from their defaults


def settings_for(method: str, stream: str, net: str) -> Settings:
    """The settings of a method for a stream and a network; what the user asks for comes on top.

    Today these are the method's defaults, whatever the stream and the network. Settings that were
    found by tuning are to be read here.

    >>> settings_for("rank", "p-mnist", "mlp")
    Settings(recipe={}, options={})
    """
    return Settings(recipe=dict(method_info(method).recipe), options={})
