"""Freed tensor memory is kept for the next tensors."""

import os
import subprocess
import sys
import textwrap

import pytest

STEPS = """
    import resource, sys
    import torch
    from rankup.utils.malloc import keep_freed_memory

    if sys.argv[1] == "keep":
        keep_freed_memory()

    def step():
        made = [torch.ones(10 << 20) for _ in range(4)]  # 40 MiB each
        return sum(float(each[0]) for each in made)

    torch.set_num_threads(1)
    for _ in range(10):  # until every tensor has its place
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(way: str) -> int:
    """Page faults in ten steps of 40,960 pages each."""
    command = [sys.executable, "-c", textwrap.dedent(STEPS), way]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="it is left to the C library elsewhere")
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="another allocator may be in use")
def test_freed_memory_is_kept() -> None:
    assert faults("keep") < 1_000
    assert faults("leave") > 100_000
