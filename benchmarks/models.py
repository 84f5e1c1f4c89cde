"""Writes docs/models.md: what becomes of published models when they are grown.

    python benchmarks/models.py > docs/models.md

Takes the models of tests/helpers/published.py, which tests/real_modules teaches two tasks each.
Needs timm and transformers.
"""

import math
import statistics
import sys
import warnings
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.promises import Outcome, describe
from helpers.published import TIMM, TRANSFORMERS, Published
from rankup.growing.names import starred
from rankup.layers.spec import TensorSpec

_HEAD = """# Published models

Written by `benchmarks/models.py`: each model as `rankup.grow(model, Rank(8, 2), base="keep")` makes
it, with nothing excluded. The models are small or cut in depth and have random weights;
`tests/real_modules` teaches each of them two tasks and checks every promise.

*Share* is that of numbers in matrices that have factors and get a gradient, of all parameters but
embeddings, positions and heads. Norms, biases and other vectors are each task's own everywhere;
*per task* names matrices that are, too, because their factors would take more numbers than they.
*Shared* are parameters that all tasks read as they were given. A mixed batch runs in one pass, or
in groups of one task each where layers run their own forward.
"""


def main() -> None:
    warnings.simplefilter("ignore")
    text = [_HEAD]
    for library, models in (("timm", TIMM), ("transformers", TRANSFORMERS)):
        rows, shares = [], []
        for name, published in models.items():
            outcome = describe(published)
            shares.append(outcome.share)
            rows.append(_row(name, published, outcome))
        middle, least = statistics.median(shares), min(shares)
        text.append(f"## {library} {version(library)}\n")
        text.append(f"Share: median {middle:.3f}, least {least:.3f}, of {len(shares)} models.\n")
        text.append("| model | share | matrices per task | shared | mixed batches |")
        text.append("|---|---:|---|---|---|")
        text += [*rows, ""]
    print("\n".join(text).rstrip())


def _row(name: str, published: Published, outcome: Outcome) -> str:
    plan = outcome.net.plan
    parameters = dict(published.make().named_parameters())
    per_task = [
        spec.name
        for spec in plan.layers
        if isinstance(spec, TensorSpec) and math.prod(spec.shape) > max(spec.shape, default=1)
    ]
    shared = [name for name, _ in plan.dense.tensors if name in parameters]
    mixed = "one pass" if outcome.passes == 1 else "groups"
    given = f" (`head={list(published.head)}`)" if published.head else ""
    return (
        f"| {name}{given} | {outcome.share:.3f} | {_told(per_task)} | {_told(shared)} | {mixed} |"
    )


def _told(names: Iterable[str]) -> str:
    """The last parts of names, each once, with how many there are."""
    counts: dict[str, int] = {}
    for name in names:
        short = ".".join(starred(name).split(".")[-2:]).removeprefix("*.")
        counts[short] = counts.get(short, 0) + 1
    told = [f"`{short}`" + (f" × {n}" if n > 1 else "") for short, n in counts.items()]
    return ", ".join(told[:4]) + (f" and {len(told) - 4} more" if len(told) > 4 else "")


if __name__ == "__main__":
    main()
