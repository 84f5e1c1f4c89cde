"""The command `rankup serve`."""

import os
from dataclasses import replace
from typing import Annotated

import typer

from rankup.cli.network import NetworkPath, network_folder
from rankup.errors import RankupError

_TOKEN = "RANKUP_TOKEN"


def serve(
    path: NetworkPath,
    port: Annotated[int, typer.Option(help="0 takes any that is free.", min=0, max=65535)] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than local ones need a token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            help=f"What those who ask must present. Better given as {_TOKEN}: options of a process "
            "are seen by all users of a machine."
        ),
    ] = None,
    allow_learning: Annotated[
        bool, typer.Option("--allow-learning", help="Let tasks be added through the page.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Most inputs in a batch.", min=1, max=4096)] = 64,
    wait: Annotated[
        float, typer.Option(help="Milliseconds that an input waits for others.", min=0, max=1000)
    ] = 2.0,
    queue: Annotated[int, typer.Option(help="Most inputs that wait.", min=1)] = 1024,
    body: Annotated[float, typer.Option(help="Most MB of a request.", min=0.001)] = 16,
    pixels: Annotated[float, typer.Option(help="Most megapixels of an image.", min=0.001)] = 32,
    patience: Annotated[
        float, typer.Option(help="Seconds in which a request must have come.", min=0.1)
    ] = 20,
    threads: Annotated[int, typer.Option(help="Threads that compute.", min=1)] = 1,
) -> None:
    """Answer for all tasks of a network over HTTP, with a page to try them.

    Requests of different tasks that arrive together run as one batch. Tasks that `rankup learn` or
    another process adds to the folder are answered for without a restart. Ends on Ctrl-C or
    SIGTERM, once all that was asked is answered.
    """
    try:
        from rankup.inference.app import Options, create_app
        from rankup.inference.server import is_loopback, run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("rankup"):
            raise
        raise RankupError(
            f"serving needs the package {error.name}, which comes with pip install 'rankup[serve]'"
        ) from None
    import torch

    token = token or os.environ.get(_TOKEN) or None
    local = is_loopback(host)
    if not local and token is None:
        raise RankupError(
            f"{host} can be reached from other machines: give a token, as {_TOKEN} or with --token"
        )
    if token is not None and (not token.isascii() or not token.isprintable() or " " in token):
        raise RankupError("a token must be printable ASCII without spaces")
    torch.set_num_threads(threads)
    options = Options(most=batch, wait_ms=wait, token=token, learn=allow_learning)
    limits = replace(
        options.limits,
        queue=queue,
        body=int(body * 1e6),
        pixels=int(pixels * 1e6),
        patience=patience,
    )
    options = replace(options, limits=limits, hosts=options.hosts if local else None)
    app = create_app(network_folder(path), options)

    def started(url: str) -> None:
        print(f"Serving {path} at {url} (Ctrl-C ends it)", flush=True)

    run(app, host, port, limits.patience, started)
