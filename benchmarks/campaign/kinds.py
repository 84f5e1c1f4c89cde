"""The kinds of cases, and what each of them damages."""

from campaign import crashes, files
from campaign.cases import Work
from campaign.manifests import manifests
from campaign.weights import rivals
from campaign.world import NETWORKS, World

KINDS: dict[str, Work] = {
    "flips": files.flips,
    "zeros": files.zeros,
    "rivals": rivals,
    "files": files.kinds_of_files,
    "manifests": manifests,
    "kills": crashes.kills,
    "saves": crashes.saves,
    "full": crashes.full_disks,
    "races": crashes.races,
}

# How many cases of each `make test` runs.
SAMPLE = {
    **{"flips": 2, "zeros": 1, "rivals": 2, "files": 2, "manifests": 8},
    **{"kills": 1, "saves": 8, "full": 1, "races": 1},
}


def needs(kind: str, world: World) -> list[str]:
    """What a kind of cases damages."""
    match kind:
        case "flips" | "zeros" | "files":
            return [*world.damaged]
        case "rivals":
            return _with_stopped(world.rivals)
        case "manifests":
            return [*NETWORKS, "rank"]
        case "saves":
            return ["rank", "stopped-rank"]
        case _:
            return _with_stopped((*world.killed, "rank"))


def _with_stopped(methods: tuple[str, ...]) -> list[str]:
    return [f"{prefix}{method}" for method in methods for prefix in ("", "stopped-")]
