"""The routers there are, by name."""

from rankup.growing.routing import RouterRule
from rankup.net.routers.analytic import Analytic
from rankup.net.routers.base import Router
from rankup.net.routers.energy import Energy
from rankup.net.routers.mahalanobis import Mahalanobis
from rankup.net.routers.means import Means

_KINDS: dict[str, type[Router]] = {
    kind.name: kind for kind in (Energy, Mahalanobis, Means, Analytic)
}


def routers_of(rule: RouterRule, seed: int) -> dict[str, Router]:
    """The routers that a rule names, by name."""
    return {name: _KINDS[name](rule, seed) for name in rule.names}
