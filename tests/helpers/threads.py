"""Work in other threads."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def meanwhile(work: Callable[[], object], threads: int = 1) -> Iterator[None]:
    """Work that other threads repeat while the body runs."""
    over, failed = threading.Event(), list[BaseException]()

    def go_on() -> None:
        try:
            while not over.is_set():
                work()
        except BaseException as error:
            failed.append(error)

    running = [threading.Thread(target=go_on) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in running:
            thread.join()
    assert not failed, failed
