"""Commands under torchrun: the process group that it asks for. No torch here: commands ask about
it before anything heavy is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankup.distributed.ranks import Ranks


def is_follower() -> bool:
    """Whether torchrun has started this process beside a first one, which writes and speaks for
    all."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"


@contextmanager
def process_group(wants_gpu: bool) -> Iterator[Ranks | None]:
    """Inside, torchrun's processes are a group, if it has started this one and others: by NCCL on
    GPUs, one for each process of a machine, and by gloo on the CPU."""
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
