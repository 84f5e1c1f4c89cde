"""Files that a call passes through: how far a reader must jump to follow `grow` and `rankup run`.

python benchmarks/call_paths.py                   # the package in src
python benchmarks/call_paths.py OLDER/src src     # several versions side by side
"""

import argparse
import contextlib
import inspect
import io
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

HERE = Path(__file__).resolve().parent.parent / "src"
TITLES = ("files in grow", "calls across files in grow", "files in rankup run")


def passed_through(package: str, function: Callable[[], object]) -> tuple[int, int]:
    """How many of the package's files a call enters, and how many calls cross files.

    Torch may stand between a caller and what it calls, and a generator counts once.
    """
    files: set[str] = set()
    generators: dict[int, FrameType] = {}  # kept alive, so that no id comes twice
    crossings = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal crossings
        code = frame.f_code
        # Importing a file runs its body, which is no call that a reader follows.
        if event != "call" or not _is_in(package, frame) or code.co_name == "<module>":
            return
        if code.co_flags & inspect.CO_GENERATOR:
            if id(frame) in generators:
                return
            generators[id(frame)] = frame
        files.add(code.co_filename)
        caller = frame.f_back
        while caller is not None and not _is_in(package, caller):
            caller = caller.f_back
        crossings += caller is not None and caller.f_code.co_filename != code.co_filename

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len(files), crossings


def _is_in(package: str, frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(package)


def run(folder: str) -> None:
    """`rankup run` with the smallest built-in stream, as the command line runs it."""
    sys.argv = ["rankup", "run", "--stream", "s-digits", "--out", folder]
    try:
        runpy.run_module("rankup", run_name="__main__")
    except SystemExit as exit:
        if exit.code:
            raise


def measure() -> None:
    """Print the figures of the `rankup` that this process imports."""
    import rankup

    package = str(Path(rankup.__file__).parent) + os.sep

    def grow() -> object:
        return rankup.grow(rankup.models.mlp(784, hidden=[256, 256]), rankup.Rank(11, 1))

    grow()  # imports everything
    figures = list(passed_through(package, grow))
    nowhere = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, nowhere:
        figures.append(passed_through(package, lambda: run(f"{folder}/run"))[0])
    print(*figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="*", type=Path, default=[HERE])
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return measure()
    for source in options.sources:
        command = [sys.executable, __file__, "--measure"]
        env = {**os.environ, "PYTHONPATH": str(source.resolve())}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        print(source)
        for title, figure in zip(TITLES, done.stdout.split(), strict=True):
            print(f"  {title:28} {figure:>5}")


if __name__ == "__main__":
    main()
