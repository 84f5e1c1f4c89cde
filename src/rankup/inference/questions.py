"""Parsing requests for `/predict` into questions: inputs, each with the tasks to run it for."""

import base64
import binascii
import json
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rankup.errors import RankupError
from rankup.inference.limits import Limits
from rankup.inference.served import Snapshot, TaskCard

KINDS = ("image", "text", "tensor")
DTYPES = {"float32": "<f4", "uint8": "u1", "int64": "<i8"}
_KEYS = {*KINDS, "task", "tasks"}
_TOP = 5  # classes of an answer, the likeliest first


class Packed(NamedTuple):
    """A tensor as little-endian bytes in C order."""

    content: bytes
    dtype: str  # of DTYPES
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """One input and the tasks to run it for.

    Attributes:
        kind: one of `KINDS`.
        content: an encoded image, a text, nested lists of numbers, or packed numbers.
        tasks: that answer it.
        label: what the answer calls it, such as a file's name.
        guess: whether the task is to be guessed; `tasks` then only says how inputs are made.
    """

    kind: str
    content: Any
    tasks: tuple[TaskCard, ...]
    label: str | None = None
    guess: bool = False


@dataclass(frozen=True)
class Asked:
    """A parsed request."""

    questions: tuple[Question, ...]
    top: int  # classes of an answer


def from_json(body: bytes, known: Snapshot, limits: Limits) -> Asked:
    """Parse a JSON request with one input, or with `items`, each of which may name its tasks."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise RankupError("the request's body is not JSON") from None
    if not isinstance(data, dict):
        raise RankupError("the request's body must be a JSON object with an image, text or tensor")
    top = _top(data.pop("top", _TOP))
    items = data.pop("items", None)
    if items is None:
        items, shared = [data], {}
    elif not isinstance(items, list) or not items:
        raise RankupError("items must be a list of at least one object")
    else:
        shared = data
        if wrong := sorted(shared.keys() - {"task", "tasks"}):
            raise RankupError(f"{wrong[0]!r:.60} belongs into each of the items, not beside them")
    questions = tuple(_question(item, shared, known) for item in items)
    return _checked(Asked(questions, top), limits)


def from_form(
    images: Sequence[tuple[str | None, bytes]],
    texts: Sequence[str],
    task: Sequence[str],
    tasks: Sequence[str],
    top: str | None,
    known: Snapshot,
    limits: Limits,
) -> Asked:
    """Parse a form with images and texts, for one task, one task for each of them in order, or
    several tasks for all."""
    inputs: list[tuple[str, Any, str | None]]
    inputs = [("image", content, label) for label, content in images]
    inputs += [("text", text, None) for text in texts]
    if not inputs:
        raise RankupError("the form has neither an image nor a text")
    asked: list[_Whom]
    if len(task) > 1 and not tasks:
        if len(task) != len(inputs):
            raise RankupError(
                f"got {len(task)} times task for {len(inputs)} inputs, expected one for all or one "
                "for each; several for all are given as tasks"
            )
        asked = [_Whom((known.task(name),)) for name in task]
    else:
        single = task[0] if task else None
        several: Any = "all" if list(tasks) == ["all"] else list(tasks) or None
        asked = [_whom(single, several, known)] * len(inputs)
    questions = tuple(
        Question(kind, content, whom.tasks, label, whom.guess)
        for (kind, content, label), whom in zip(inputs, asked, strict=True)
    )
    return _checked(Asked(questions, _top(top or _TOP)), limits)


def _question(item: object, shared: dict[str, Any], known: Snapshot) -> Question:
    if not isinstance(item, dict):
        raise RankupError("each of the items must be an object with an image, text or tensor")
    if wrong := sorted(item.keys() - _KEYS):
        raise RankupError(f"there is no {wrong[0]!r:.60}, expected {', '.join(sorted(_KEYS))}")
    kinds = [kind for kind in KINDS if kind in item]
    if len(kinds) != 1:
        got = " and ".join(kinds) or "none of them"
        raise RankupError(f"an input has one of image, text and tensor, got {got}")
    (kind,) = kinds
    own = item if item.keys() & {"task", "tasks"} else shared
    whom = _whom(own.get("task"), own.get("tasks"), known)
    content = item[kind]
    if kind == "image":
        content = _from_base64(content, "image must be an encoded image in base64")
    elif kind == "text" and not isinstance(content, str):
        raise RankupError(f"text must be a string, got {_type(content)}")
    elif kind == "tensor":
        content = _numbers(content)
    return Question(kind, content, whom.tasks, guess=whom.guess)


class _Whom(NamedTuple):
    """Which tasks answer an input, or one that says how it is made if the task is guessed."""

    tasks: tuple[TaskCard, ...]
    guess: bool = False


def _whom(task: object, tasks: object, known: Snapshot) -> _Whom:
    if task is not None and tasks is not None:
        raise RankupError("give either task, a name, or tasks, a list of names, not both")
    if task is not None:
        return _Whom((known.task(task),))
    if tasks == "all":
        if not known.tasks:
            raise RankupError("the network has learned no task yet")
        return _Whom(tuple(known.tasks.values()))
    if tasks is not None:
        if not isinstance(tasks, list) or not tasks:
            raise RankupError('tasks must be a list of names, or "all"')
        return _Whom(tuple(known.task(name) for name in tasks))
    if len(known.tasks) == 1 or known.guesses:
        return _Whom(tuple(known.tasks.values())[:1], known.guesses)
    raise RankupError(
        f"the network has {len(known.tasks)} tasks: name one with task, several with tasks, or all "
        'with "tasks": "all"'
    )


def _numbers(content: object) -> list[Any] | Packed:
    """Parse nested lists, or packed numbers, which take about a quarter of the time."""
    if isinstance(content, list):
        return content
    if not isinstance(content, dict):
        raise RankupError(f"tensor must be nested lists of numbers, got {_type(content)}")
    if content.keys() != {"base64", "dtype", "shape"} or content["dtype"] not in DTYPES:
        raise RankupError(
            f"packed numbers have base64, a dtype of {' or '.join(DTYPES)}, and a shape, got "
            f"{reprlib.repr(content)}"
        )
    shape = content["shape"]
    if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
        raise RankupError(f"shape must be a list of whole numbers, got {reprlib.repr(shape)}")
    packed = _from_base64(content["base64"], "packed numbers must be in base64")
    return Packed(packed, content["dtype"], tuple(shape))


def _from_base64(content: object, refusal: str) -> bytes:
    try:
        if not isinstance(content, str):
            raise ValueError
        return base64.b64decode(content, validate=True)
    except (ValueError, binascii.Error):
        raise RankupError(refusal) from None


def _top(given: object) -> int:
    try:
        top = int(given) if isinstance(given, int | str) and not isinstance(given, bool) else 0
    except ValueError:
        top = 0
    if not 1 <= top <= 1000:
        raise RankupError(f"top must be a whole number from 1 to 1000, got {given!r:.60}")
    return top


def _checked(asked: Asked, limits: Limits) -> Asked:
    count = sum(len(question.tasks) for question in asked.questions)
    if count > limits.items:
        raise RankupError(
            f"the request asks {count} times (inputs by tasks), expected at most {limits.items}"
        )
    return asked


def _type(value: object) -> str:
    names = {str: "a string", bool: "a truth value", list: "a list", dict: "an object"}
    return "nothing" if value is None else names.get(type(value), "a number")
