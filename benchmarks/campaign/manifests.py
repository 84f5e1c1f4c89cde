"""Manifests of strangers: edited in their structure and sealed again."""

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from campaign import users
from campaign.cases import done
from campaign.world import NETWORKS, World
from rankup.utils.seal import seal

NUMBERS = (
    *(-1, 0, 1, 2, 3, 5, 2**31 - 1, 2**31, 2**63, 2**64, 10**400),
    *(0.5, 1e9, 1e308, float("inf"), float("nan")),
)
TEXTS = (
    *("", "x", "..", "../../etc/passwd", "/etc/passwd", "a" * 10_000_000, "é\u0301", "a b"),
    *("\x1b[2J\x1b[H", "two\nlines", "\x00", "\u202eabc", "\ud800", "\u2028", "float32", "int8"),
)
OTHERS = (None, True, False, [], {}, [[]], {"a": 1}, [1, 2])
DEEP = 100_000

Path_ = tuple[Any, ...]  # of a value in a manifest
Edit = Callable[[dict[str, Any], random.Random], str]


def manifests(world: World, draw: random.Random, folder: Path) -> None:
    """One to three edits, then load and verify."""
    name = draw.choice((*NETWORKS, "rank"))
    source = world.root / name
    net = Path(shutil.copytree(source / "net" if name == "rank" else source, folder / "net"))
    path = net / "manifest.json"
    data = json.loads(path.read_bytes())
    del data["sha256"]
    done(name)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        done(draw.choice(EDITS)(data, draw))
    path.write_bytes(sealed(data, draw))
    users.check_load(net, world.answers[name], world.inputs[name], resealed=True)


def sealed(data: dict[str, Any], draw: random.Random) -> bytes:
    """A manifest as text. Now and then with nesting too deep to be sealed, or keys twice."""
    text = json.dumps({**data, "sha256": seal(data)})
    match draw.randrange(12):
        case 0:
            deep = draw.choice(("[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP))
            place = draw.choice(('"tasks": ', '"parts": ', '"model": ', '"growth": '))
            text = text.replace(place, f'{place}{deep}, "other": ', 1)
        case 1:
            text = text.replace("{", '{"name": "twice", ', draw.randrange(1, 4))
        case 2:
            text = text.replace('"version": 1', f'"version": {"9" * 5000}', 1)
    return text.encode()


def places(data: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Where the values of a manifest are."""
    entries = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in entries:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def _parent(data: Any, path: Path_) -> Any:
    for key in path[:-1]:
        data = data[key]
    return data


def _chosen(data: dict[str, Any], draw: random.Random) -> tuple[Any, Any, str]:
    """The object or list that holds a value, its key there, and where that is."""
    path = draw.choice(list(places(data)) or [("format",)])
    data.setdefault("format", "")
    return _parent(data, path), path[-1], ".".join(map(str, path))[:80]


def replaced(data: dict[str, Any], draw: random.Random) -> str:
    holder, key, where = _chosen(data, draw)
    group = draw.choice((NUMBERS, TEXTS, OTHERS))
    holder[key] = copy.deepcopy(draw.choice(group))
    return f"{where} is {str(holder[key])[:30]!r}"


def near(data: dict[str, Any], draw: random.Random) -> str:
    """A value of the same type."""
    holder, key, where = _chosen(data, draw)
    match holder[key]:
        case bool(value):
            holder[key] = not value
        case int(value) | float(value):
            holder[key] = draw.choice((value + 1, value - 1, 2 * value, -value, value * 1000))
        case str(value):
            holder[key] = draw.choice((value + "x", value[:-1], value.upper(), draw.choice(TEXTS)))
        case list(value):
            draw.shuffle(value)
        case dict(value):
            holder[key] = dict(reversed(value.items()))
        case _:
            holder[key] = 1
    return f"{where} is {str(holder[key])[:30]!r}"


def removed(data: dict[str, Any], draw: random.Random) -> str:
    holder, key, where = _chosen(data, draw)
    del holder[key]
    return f"no {where}"


def doubled(data: dict[str, Any], draw: random.Random) -> str:
    holder, key, where = _chosen(data, draw)
    if isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[draw.choice(("other", "name", "__class__", "kind"))] = holder[key]
    return f"{where} twice"


def swapped(data: dict[str, Any], draw: random.Random) -> str:
    """Two entries in each other's place."""
    one, at, where = _chosen(data, draw)
    keys = list(range(len(one))) if isinstance(one, list) else list(one)
    other = draw.choice(keys)
    one[at], one[other] = one[other], one[at]
    return f"{where} and {other} swapped"


def longer(data: dict[str, Any], draw: random.Random) -> str:
    holder, key, where = _chosen(data, draw)
    if isinstance(holder[key], list) and holder[key]:
        holder[key] = holder[key] * draw.choice((2, 1000, 100_000 // len(holder[key]) + 1))
    return f"{where} longer"


EDITS: tuple[Edit, ...] = (replaced, near, removed, doubled, swapped, longer)
