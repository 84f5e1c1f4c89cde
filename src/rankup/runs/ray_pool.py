"""Running work on a Ray cluster of one or many machines, like `process_pool`, for `--on ray`.

Ray decides which node works on what. This module submits the work, receives messages, and submits
work again that was lost with a process or a node. As folders are consistent at all times, it
continues from its last checkpoint.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from rankup.errors import RankupError
from rankup.runs import process_pool
from rankup.runs.mirror import Changed, Files, Portable, mirrored, pack, unpack
from rankup.storage.atomic import temporary_of
from rankup.utils.signals import undisturbed

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

RAY = "ray"  # the cluster that RAY_ADDRESS names, or a new one on this machine
_CLIENT = "ray://"

_LISTEN = 0.1  # seconds between checks for messages
_PATIENCE = 10.0  # seconds for a cluster to answer
_MOST_TRIES = 5  # after which work that was lost each time is not submitted again


class Needs(NamedTuple):
    """The resources that an item of work needs. With a fraction of a GPU, several share one."""

    cpus: float = 1
    gpus: float = 0


def check_address(on: str | None) -> str | None:
    """Raise an error for an invalid or unreachable address, or if Ray is not installed."""
    if on is None:
        return None
    if on != RAY and not (on.startswith(_CLIENT) and len(on) > len(_CLIENT)):
        raise RankupError(f"--on takes ray or ray://HOST:10001, got {on!r}")
    if find_spec("ray") is None:
        raise RankupError(f"--on {on} needs Ray: pip install 'rankup[ray]'")
    if found := _cluster(on):
        _refuse_unreachable(found)
    return on


def _cluster(on: str) -> str | None:
    """The address of a cluster that is running already; None if one must be started."""
    return os.environ.get("RAY_ADDRESS") if on == RAY else on


def _refuse_unreachable(address: str) -> None:
    """Raise an error if nothing answers at an address. Ray itself would try for minutes."""
    host, _, port = address.removeprefix(_CLIENT).rpartition(":")
    if not (host and port.isdigit()):
        return  # such as auto, which Ray looks up
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RankupError(f"cannot connect to Ray at {address}: {reason}") from error


def pool_on(address: str | None) -> AbstractContextManager[RayPool | None]:
    """A pool on the cluster at an address; None without one."""
    return RayPool(address) if address else nullcontext()


class RayPool:
    """A context manager with a cluster, to which it connects when it is first needed. A cluster
    that it has started itself ends with the block.

    Args:
        address: `ray` for the cluster that RAY_ADDRESS names or else a new one on this machine, or
            `ray://HOST:10001`.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._connected = False
        self._sent: list[tuple[object, Any]] = []  # values in the object store
        self._mailbox: Any = None
        self._calls = 0  # of `run`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with undisturbed():
            if self._mailbox is not None:
                self._ray.kill(self._mailbox)
                self._mailbox = None
            if self._connected:
                self._ray.shutdown()

    @cached_property
    def _ray(self) -> Any:
        ray = _import_ray()
        if ray.is_initialized():
            return ray
        found = _cluster(self.address)
        quiet = {"log_to_driver": False, "logging_level": "error"}
        try:
            with undisturbed():  # an interrupt would leave half of a cluster
                if found:
                    ray.init(found, **quiet)
                else:
                    ray.init(
                        "local", num_cpus=process_pool.cores(), include_dashboard=False, **quiet
                    )
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise RankupError(
                f"cannot connect to Ray at {found or 'this machine'}: {reason}"
            ) from (error)
        self._connected = True
        return ray

    def put(self, value: object) -> Any:
        """A reference by which workers `fetch` a value, which is sent to each node only once."""
        for known, reference in self._sent:
            if known is value:
                return reference
        reference = self._ray.put(value)
        self._sent.append((value, reference))
        return reference

    def run(
        self,
        work: Callable[[Item], Outcome],
        items: Sequence[Item],
        *,
        needs: Needs,
        hear: Callable[[Any], None],
        lost: str,
    ) -> Generator[tuple[Item, Outcome], None, None]:
        """Run `work` on all items, and yield each with its result as it is done. The first error
        ends all work.

        Args:
            needs: the resources that each item needs.
            hear: called with the messages that workers send by `tell`.
            lost: the error message if the same work is lost too often.
        """
        if not items:
            return
        ray = self._ray
        self._refuse_unmet(needs)
        outbox = self._outbox()
        remote = ray.remote(
            num_cpus=needs.cpus, num_gpus=needs.gpus, max_retries=0, scheduling_strategy="SPREAD"
        )(_work)
        folders = [path for item in items for path in _folders_of(item)]
        with self._shared(folders) as shared:

            def submit(item: Item, again: bool) -> Any:
                content = None if shared else {path: pack(path) for path in _folders_of(item)}
                home = _Home(outbox, _variables(), Path.cwd(), shared, content, again)
                return remote.remote(work, item, home)

            pending = {submit(item, False): item for item in items}
            tries = Counter[int]()
            try:
                while pending:
                    done, _ = ray.wait([*pending], timeout=_LISTEN)
                    for message in self._messages_in(outbox):
                        _receive(message, hear)
                    for reference in done:
                        item = pending.pop(reference)
                        try:
                            outcome, content = ray.get(reference)
                        except ray.exceptions.RayTaskError as error:
                            raise error.cause from error
                        except ray.exceptions.RayError as error:  # its process or node is gone
                            tries[id(item)] += 1
                            if tries[id(item)] >= _MOST_TRIES:
                                why = next(iter(str(error).splitlines()), type(error).__name__)
                                raise RankupError(f"{lost} ({why})") from error
                            pending[submit(item, True)] = item
                            continue
                        for folder, files in content.items():
                            unpack(folder, files, whole=True)
                        yield item, outcome
            finally:
                with undisturbed():
                    for reference in pending:
                        ray.cancel(reference, force=True)

    def _outbox(self) -> _Outbox:
        """The outbox of one call of `run`. All calls share an actor, because a new one would take
        the place of a worker that has started."""
        self._mailbox = self._mailbox or _mailbox(self._ray)
        self._calls += 1
        return _Outbox(self._mailbox, self._calls)

    def _messages_in(self, outbox: _Outbox) -> list[Any]:
        try:
            told = self._ray.get(outbox.actor.take.remote())
        except self._ray.exceptions.RayError:  # lost with its node; only messages are lost
            self._mailbox = None
            return []
        return [message for call, message in told if call == outbox.call]

    def _refuse_unmet(self, needs: Needs) -> None:
        """Raise an error if no node has the resources, for which Ray would wait for ever."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if not any(
            node.get("CPU", 0) >= needs.cpus and node.get("GPU", 0) >= needs.gpus for node in nodes
        ):
            gpus = f" and {needs.gpus:g} GPU" if needs.gpus else ""
            raise RankupError(
                f"no node of the Ray cluster has {needs.cpus:g} CPU{gpus}, which a run needs"
            )

    @contextmanager
    def _shared(self, folders: Sequence[Path]) -> Iterator[_Token | None]:
        """A token in the folders by which nodes check that they have access to them; None if some
        node has none."""
        if not folders:
            yield _NO_FOLDERS
            return
        # In their common parent, because some folders may be removed before all work is done.
        common = Path(os.path.commonpath([folder.resolve() for folder in folders]))
        common.mkdir(parents=True, exist_ok=True)
        token = _Token(temporary_of(common / "seen-by-ray"), uuid.uuid4().hex)
        token.path.write_text(token.text)
        try:
            yield token if self._all_see(token) else None
        finally:
            token.path.unlink(missing_ok=True)

    def _all_see(self, token: _Token) -> bool:
        ray = self._ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

        own = None if ray.util.client.ray.is_connected() else _own_node(ray)
        others = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] != own]
        look = ray.remote(num_cpus=0)(_sees)
        looks = [
            look.options(scheduling_strategy=On(node, soft=False)).remote(token) for node in others
        ]
        return all(ray.get(looks))


def fetch(reference: Any) -> Any:
    """In a worker, the value that was `put`."""
    import ray

    return ray.get(reference)


class Mailbox:
    """An actor that keeps the messages of workers until they are taken."""

    def __init__(self) -> None:
        self._messages: list[Any] = []

    def put(self, message: Any) -> None:
        self._messages.append(message)

    def take(self) -> list[Any]:
        taken, self._messages = self._messages, []
        return taken


class _Outbox(NamedTuple):
    actor: Any
    call: int  # of `run`: work of an earlier one may have been ended while it was telling

    def put(self, message: Any) -> None:
        self.actor.put.remote((self.call, message))


class _Token(NamedTuple):
    """A file by which two machines check that they share a folder."""

    path: Path
    text: str


_NO_FOLDERS = _Token(Path(os.devnull), "")  # a file that is empty on all nodes


class _Home(NamedTuple):
    """What a worker must know of the process that submitted the work."""

    outbox: _Outbox
    variables: dict[str, str]
    directory: Path  # to which paths are relative
    token: _Token | None  # if all nodes have access to the folders
    content: dict[Path, Files] | None  # of the folders, if some nodes have not
    again: bool  # whether the work was lost before


def _work(
    work: Callable[[Item], Outcome], item: Item, home: _Home
) -> tuple[Outcome, dict[Path, Files]]:
    """Run in a worker. Returns the result, and the content of folders if they are copies."""
    os.environ.update(home.variables)
    process_pool.begin_worker(home.outbox)
    if home.content is None:
        assert home.token is not None
        if not _sees(home.token):
            raise RankupError(
                f"a node that joined the cluster does not see the folder of {home.token.path}, "
                "which all others do: mount it there, too"
            )
        with suppress(OSError):
            os.chdir(home.directory)
        if home.again:
            _wait_for_locks(item)
        return process_pool.call(work, item), {}
    with mirrored(home.content, home.outbox.put) as copies:
        assert isinstance(item, Portable)
        outcome = process_pool.call(work, item.moved(copies))
        return outcome, {folder: pack(copy) for folder, copy in copies.items()}


def _wait_for_locks(item: object) -> None:
    """Wait until a process that lost the work has released its folders."""
    import filelock

    for folder in _folders_of(item):
        if folder.is_dir():
            with suppress(filelock.Timeout), filelock.FileLock(folder / ".lock", timeout=60):
                pass


def _folders_of(item: object) -> Sequence[Path]:
    return item.folders if isinstance(item, Portable) else ()


def _receive(message: Any, hear: Callable[[Any], None]) -> None:
    if isinstance(message, Changed):
        unpack(message.folder, message.files)
    else:
        hear(message)


def _sees(token: _Token) -> bool:
    try:
        return token.path.read_text() == token.text
    except OSError:
        return False


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("RANKUP_")}


def _mailbox(ray: Any) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    here = On(_own_node(ray), soft=True)
    actor = ray.remote(num_cpus=0)(Mailbox).options(scheduling_strategy=here)
    return actor.remote()


def _own_node(ray: Any) -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


def _import_ray() -> Any:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # no telemetry
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # avoids a warning
    import ray

    return ray
