"""What the API says about itself: the parts of its OpenAPI description that types do not tell, and
a plain page of it."""

from html import escape
from typing import Any

_ERROR = {
    "description": "One sentence about what was given and what was expected.",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {"error": {"type": "string"}},
            }
        }
    },
}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return dict.fromkeys(statuses, _ERROR)


_STRINGS = {"type": "array", "items": {"type": "string"}}
_TASK = {
    "task": {"type": "string", "description": "The name of a task."},
    "tasks": {
        "description": 'Several tasks, or "all".',
        "oneOf": [_STRINGS, {"const": "all"}],
    },
}
_ITEM = {
    "type": "object",
    "description": "One of image, text and tensor, and which task is asked. A network with a "
    "router guesses the task if none is named.",
    "properties": {
        "image": {"type": "string", "format": "byte", "description": "An encoded image in base64."},
        "text": {"type": "string"},
        "tensor": {"type": "array", "items": {}, "description": "Nested lists of numbers."},
        **_TASK,
    },
    "additionalProperties": False,
}
_TOP = {"type": "integer", "minimum": 1, "maximum": 1000, "default": 5}
_FILES = {"type": "array", "items": {"type": "string", "format": "binary"}}
_JSON_BODY = {
    "oneOf": [
        {**_ITEM, "properties": {**_ITEM["properties"], "top": _TOP}},  # type: ignore[dict-item]
        {
            "type": "object",
            "required": ["items"],
            "properties": {"items": {"type": "array", "items": _ITEM}, **_TASK, "top": _TOP},
            "additionalProperties": False,
        },
    ]
}
_FORM = {
    "type": "object",
    "properties": {
        "image": _FILES,
        "text": _STRINGS,
        "task": {**_STRINGS, "description": "One for all inputs, or one for each in order."},
        "tasks": {**_STRINGS, "description": 'Several for every input, or "all".'},
        "top": _TOP,
    },
}
_ANSWERS = {
    "type": "object",
    "properties": {
        "answers": {
            "type": "array",
            "description": "An entry for each input and task, in the order asked.",
            "items": {
                "type": "object",
                "properties": {
                    "item": {"type": "integer", "description": "Which input, from 0."},
                    "file": {"type": "string"},
                    "task": {"type": "string"},
                    "guessed": {
                        "type": "object",
                        "description": "If the request named no task: how probable the guessed one "
                        "is, and which share of its held-out samples fit it better.",
                        "properties": {
                            "probability": {"type": "number"},
                            "none": {"type": "number"},
                        },
                    },
                    "classes": {
                        "type": "array",
                        "description": "The likeliest first.",
                        "items": {
                            "type": "object",
                            "properties": {
                                "name": {"type": "string"},
                                "probability": {"type": "number"},
                            },
                        },
                    },
                },
            },
        }
    },
}


def _json_of(schema: dict[str, Any], what: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": what, "content": {"application/json": {"schema": schema}}}}


def _body(**kinds: dict[str, Any]) -> dict[str, Any]:
    names = {"json": "application/json", "form": "multipart/form-data"}
    content = {names[kind]: {"schema": schema} for kind, schema in kinds.items()}
    return {"requestBody": {"required": True, "content": content}}


PREDICT: dict[str, Any] = {
    "summary": "Ask tasks about images, texts or numbers.",
    "openapi_extra": _body(json=_JSON_BODY, form=_FORM),
    "responses": _json_of(_ANSWERS, "Classes with their probabilities.")
    | _errors(400, 401, 408, 413, 415, 503),
}
TASKS: dict[str, Any] = {
    "summary": "The tasks: their classes, accuracy, size, inputs and what they select from.",
    "responses": _json_of({"type": "object"}, "The network and its tasks.") | _errors(401),
}
SHARING: dict[str, Any] = {
    "summary": "For each task, which share of its weights comes from which task's factors.",
    "responses": _json_of(
        {"type": "object"}, "Shares of seeded factors, then of each task's, up to its own."
    )
    | _errors(401),
}
HEALTH: dict[str, Any] = {
    "summary": "Whether the server answers.",
    "responses": _json_of({"type": "object"}, '{"status": "ok", "tasks": 5}'),
}
METRICS: dict[str, Any] = {
    "summary": "Counts and times for Prometheus.",
    "responses": {200: {"description": "Text.", "content": {"text/plain": {}}}} | _errors(401),
}
LEARNING: dict[str, Any] = {
    "summary": "Whether tasks may be added, and the progress of those being learned.",
    "responses": _json_of({"type": "object"}, "Progress with a curve.") | _errors(401),
}
LEARN: dict[str, Any] = {
    "summary": "Learn a task from a zip with a folder of images for each class.",
    "openapi_extra": _body(
        form={
            "type": "object",
            "required": ["name", "zip"],
            "properties": {
                "name": {"type": "string"},
                "zip": {"type": "string", "format": "binary"},
                "epochs": {"type": "integer", "minimum": 1, "maximum": 1000},
            },
        }
    ),
    "status_code": 202,
    "responses": {202: {"description": "It has begun."}} | _errors(400, 401, 403, 409, 413),
}

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>rankup: API</title>
<link rel="stylesheet" href="/page.css">
<link rel="icon" href="/icon.svg">
</head>
<body>
<main class="docs">
<p><a href="/">Back to the page</a></p>
<h1>API</h1>
<p>{about} The full description is <a href="/openapi.json">openapi.json</a>.</p>
{paths}
</main>
</body>
</html>
"""


def page(openapi: dict[str, Any]) -> str:
    """The paths of an OpenAPI description as a page without scripts."""
    sections = [
        _section(path, method, about)
        for path, methods in openapi["paths"].items()
        for method, about in methods.items()
    ]
    return _PAGE.format(about=escape(openapi["info"]["description"]), paths="\n".join(sections))


def _section(path: str, method: str, about: dict[str, Any]) -> str:
    lines = [f"<h2><code>{method.upper()} {escape(path)}</code></h2>"]
    lines.append(f"<p>{escape(about['summary'])}</p>")
    for kind, body in about.get("requestBody", {}).get("content", {}).items():
        lines.append(f"<h3>{escape(kind)}</h3>")
        for schema in body["schema"].get("oneOf", [body["schema"]]):
            rows = "".join(
                f"<dt><code>{escape(name)}</code></dt>"
                f"<dd>{escape(entry.get('description') or entry.get('type', ''))}</dd>"
                for name, entry in schema["properties"].items()
            )
            lines.append(f"<dl>{rows}</dl>")
    answers = "".join(
        f"<dt>{escape(status)}</dt><dd>{escape(answer['description'])}</dd>"
        for status, answer in about["responses"].items()
    )
    return "\n".join([*lines, f"<h3>Answers</h3><dl>{answers}</dl>"])
