"""The process group of commands that torchrun has started. Torch is imported only when a group is
made, because commands check for torchrun before anything slow is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankup.distributed.ranks import Ranks


def is_follower() -> bool:
    """Whether torchrun has started this process, and it is not the first: only that one prints and
    writes files."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"


@contextmanager
def process_group(wants_gpu: bool) -> Iterator[Ranks | None]:
    """Inside, the processes that torchrun has started form a group, by NCCL with a GPU for each, or
    by gloo on the CPU. Yields None if torchrun has not started this process, or no others."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        yield None
        return
    import torch
    import torch.distributed as dist

    from rankup.distributed.ranks import current

    on_gpu = wants_gpu and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield current()
    finally:
        dist.destroy_process_group()
