"""Freed tensor memory is kept for the next tensors."""

import os
import subprocess
import sys
import textwrap

import pytest

FAULTS = """
    import resource
    import torch
    from rankup.utils.malloc import keep_freed_memory

    def faults():
        for step in range(14):
            if step == 10:  # by now every tensor has its place
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            tensors = [torch.ones(10 << 20) for _ in range(2)]  # 10,240 pages each
            del tensors
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    torch.set_num_threads(1)
    print(faults())
    keep_freed_memory()
    print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it is left to the C library elsewhere")
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="another allocator may be in use")
def test_freed_memory_is_kept() -> None:
    command = [sys.executable, "-c", textwrap.dedent(FAULTS)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    by_default, kept = map(int, done.stdout.split())
    assert by_default > 50_000
    assert kept < 500
