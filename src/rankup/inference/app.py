"""The application: the paths of the server and their answers."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import rankup
from rankup.errors import RankupError
from rankup.inference import api_docs, questions
from rankup.inference.answering import Answering, is_quick, probabilities
from rankup.inference.batcher import Batcher, Closed, QueueFull
from rankup.inference.guard import Guard
from rankup.inference.guessing import Guesser
from rankup.inference.learning import Learning
from rankup.inference.limits import Limits, Refused
from rankup.inference.metrics import CONTENT_TYPE, Metrics
from rankup.inference.served import Served

_PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_PATHS = frozenset({*_PAGE, "/predict", "/tasks", "/sharing", "/health", "/metrics", "/learn"})
_as_json = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps makes an encoder each time
_LARGE = 1 << 16  # bytes from which on JSON is parsed in a thread


@dataclass(frozen=True)
class Options:
    """How a network is served.

    Args:
        most: inputs in a batch.
        wait_ms: milliseconds that an input waits for others.
        token: that requests must have; None if they need none.
        hosts: host names that requests may have; None for any.
        learn: whether tasks may be added through the page.
        limits: on requests.
    """

    most: int = 64
    wait_ms: float = 2.0
    token: str | None = None
    hosts: frozenset[str] | None = frozenset({"localhost", "127.0.0.1", "[::1]"})
    learn: bool = False
    limits: Limits = field(default_factory=Limits)


def create_app(folder: str | Path, options: Options | None = None) -> FastAPI:
    """Make an ASGI application that serves the network in a folder.

    Tasks that are saved to the folder while it runs are served, too.
    """
    return _Application(Path(folder), options or Options()).app


class _Application:
    def __init__(self, folder: Path, options: Options) -> None:
        self.options, self.metrics = options, Metrics()
        self.served = Served(folder)
        self.learning = Learning(folder, options.limits) if options.learn else None
        self.batcher: Batcher | None = None
        self.guesses: Batcher | None = None
        self.answering: Answering | None = None
        app = self.app = FastAPI(
            title="rankup",
            version=rankup.__version__,
            description="A network that learns task after task, and answers for all of them.",
            lifespan=self._lifespan,
            docs_url=None,  # FastAPI's own pages load scripts from elsewhere
            redoc_url=None,
        )
        app.add_middleware(
            Guard,
            limits=options.limits,
            metrics=self.metrics,
            paths=_PATHS,
            token=options.token,
            hosts=options.hosts,
        )
        # Routes are tried in this order, so the most frequent one comes first. It bypasses
        # FastAPI's parsing of requests, which takes time; the second one is only for the docs.
        app.router.routes.append(Route("/predict", _Direct(self.predict), methods=["POST"]))
        app.post("/predict", **api_docs.PREDICT)(self.predict)
        app.get("/health", **api_docs.HEALTH)(self.health)
        app.get("/tasks", **api_docs.TASKS)(self.tasks)
        app.get("/sharing", **api_docs.SHARING)(self.sharing)
        app.get("/metrics", **api_docs.METRICS)(self.numbers)
        app.get("/docs", include_in_schema=False)(self.docs)
        app.get("/learn", **api_docs.LEARNING)(self.learned)
        app.post("/learn", **api_docs.LEARN)(self.learn)
        for path, (name, kind) in _PAGE.items():
            app.get(path, include_in_schema=False)(_file(name, kind))
        app.add_exception_handler(RankupError, self._refused)
        app.add_exception_handler(HTTPException, self._no_such_path)
        app.add_exception_handler(ClientDisconnect, self._gone)
        app.add_exception_handler(Exception, self._failed)

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        options = self.options
        self.batcher = Batcher(
            self.served.now.net,
            options.most,
            options.wait_ms,
            options.limits.queue,
            finish=probabilities,
            loop=asyncio.get_running_loop(),
            inline=await asyncio.to_thread(is_quick, self.served.now),
            on_batch=self.metrics.batch,
        )
        guesser = Guesser(self.served)
        self.guesses = Batcher(
            guesser,
            options.most,
            options.wait_ms,
            options.limits.queue,
            finish=guesser.finish,
            loop=asyncio.get_running_loop(),
            on_batch=self.metrics.batch,
        )
        self.answering = Answering(self.batcher, self.guesses, options.limits)
        self.served.changed = lambda net: setattr(self.batcher, "net", net)
        self.metrics.gauge("tasks", "Tasks.", lambda: len(self.served.now.tasks))
        queues = self.batcher, self.guesses
        self.metrics.gauge("queue", "Inputs that wait.", lambda: sum(map(len, queues)))
        self.served.start()
        # Keeps later garbage collections from scanning all of torch, whose objects stay anyway.
        gc.collect()
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()
            if self.learning is not None:
                await self.learning.close()
            self.served.close()
            await asyncio.to_thread(self.batcher.close)
            await asyncio.to_thread(self.guesses.close)
            self.answering.close()

    async def health(self) -> Response:
        """Whether the server answers; with `problem` if the folder's last change cannot be read."""
        about: dict[str, Any] = {"status": "ok", "tasks": len(self.served.now.tasks)}
        if self.served.failure:
            about["problem"] = self.served.failure
        return JSONResponse(about)

    async def tasks(self) -> Response:
        now = self.served.now
        return _json(await asyncio.to_thread(lambda: now.listing))

    async def sharing(self) -> Response:
        now = self.served.now
        return _json(await asyncio.to_thread(lambda: now.sharing))

    async def predict(self, request: Request) -> Response:
        assert self.answering is not None
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        now, limits = self.served.now, self.options.limits
        if kind == "application/json":
            body = await _body_of(request)
            if len(body) < _LARGE:
                asked = questions.from_json(body, now, limits)
            else:
                asked = await asyncio.to_thread(questions.from_json, body, now, limits)
        elif kind == "multipart/form-data":
            async with request.form(max_files=limits.items, max_fields=limits.items) as form:
                images = [(part.filename, await part.read()) for part in _files(form, "image")]
                asked = questions.from_form(
                    images,
                    _words(form, "text"),
                    _words(form, "task"),
                    _words(form, "tasks"),
                    next(iter(_words(form, "top")), None),
                    now,
                    limits,
                )
        else:
            raise Refused(
                415,
                f"the request's body is {kind[:60] or 'of no type'}, expected application/json or "
                "multipart/form-data",
            )
        answers = await self.answering.answers(asked)
        return _json(_as_json({"answers": answers}).encode())

    async def numbers(self) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def docs(self) -> Response:
        return Response(api_docs.page(self.app.openapi()), media_type="text/html; charset=utf-8")

    async def learned(self) -> Response:
        """Whether tasks may be added, and the progress of those that are being learned."""
        return JSONResponse(
            {"allowed": self.learning is not None}
            | ({} if self.learning is None else {"tasks": self.learning.progress()})
        )

    async def learn(self, request: Request) -> Response:
        if self.learning is None:
            raise Refused(403, "this server does not learn: start it with --allow-learning")
        async with request.form(max_files=1, max_fields=8) as form:
            archives = _files(form, "zip")
            if len(archives) != 1:
                raise RankupError("the form needs one file named zip, with a folder for each class")
            name = next(iter(_words(form, "name")), "")
            options = {"epochs": next(iter(_words(form, "epochs")), None)}
            begun = await self.learning.begin(name, archives[0].file, self.served.now, options)
        return JSONResponse(begun, 202)

    async def _refused(self, request: Request, error: Exception) -> Response:
        """The answer to a refused request: a sentence, with a status that depends on the error."""
        headers = {}
        if isinstance(error, Refused):
            status = error.status
        elif isinstance(error, QueueFull | Closed):
            status, headers = 503, {"Retry-After": "1"}
        else:
            status = 400
        return JSONResponse({"error": str(error)}, status, headers)

    async def _no_such_path(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path[:80]
        sentences = {
            404: f"there is nothing at {path!r}: see /docs",
            405: f"{path!r} is not asked with {request.method[:20]}: see /docs",
        }
        detail = str(error.detail)[:200]
        sentence = sentences.get(error.status_code, f"the request cannot be read: {detail}")
        return JSONResponse({"error": sentence}, error.status_code, error.headers)

    async def _gone(self, request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def _failed(self, request: Request, error: Exception) -> Response:
        self.metrics.failures.inc()
        return JSONResponse({"error": "the server failed at this request: see its log"}, 500)


class _Direct:
    """An endpoint as an ASGI application, which Starlette calls directly."""

    def __init__(self, endpoint: Callable[[Request], Awaitable[Response]]) -> None:
        self.endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self.endpoint(Request(scope, receive))
        await response(scope, receive, send)


async def _body_of(request: Request) -> bytes:
    """Like `request.body()`, but without its two generators, which take longer than reading a small
    body."""
    pieces, more = [], True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(pieces)


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _file(name: str, kind: str) -> Callable[[], Any]:
    content = files("rankup.inference").joinpath("page", name).read_bytes()

    async def answer() -> Response:
        return Response(content, media_type=kind)

    return answer


def _files(form: Any, name: str) -> list[Any]:
    found = form.getlist(name)
    if any(isinstance(part, str) for part in found):
        raise RankupError(f"{name} must be a file in the form, got text")
    return list(found)


def _words(form: Any, name: str) -> list[str]:
    found = form.getlist(name)
    if not all(isinstance(part, str) for part in found):
        raise RankupError(f"{name} must be text in the form, got a file")
    return list(found)
