"""The command `rankup streams`."""

from rankup.cli.methods import Plain, list_names
from rankup.data.streams import OWN, OWN_DESCRIPTION, STREAMS


def streams(plain: Plain = False) -> None:
    """List the streams that can be learned."""
    names = {name: entry.description for name, entry in STREAMS.items()}
    list_names(names if plain else {**names, f"{OWN}PATH": OWN_DESCRIPTION}, plain)
