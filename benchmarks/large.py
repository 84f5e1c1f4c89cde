"""What it takes to grow a large module: seconds, and peak memory over that of the module alone.

    python benchmarks/large.py

A Llama of half a billion numbers, all alike, is grown in a process of its own with
`copy=False`, and for comparison with a copy. Needs transformers.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from common import write_result

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def measure(copy: bool) -> dict[str, float]:
    import transformers

    import helpers.published  # noqa: F401  (makes transformers importable)
    import rankup

    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_labels=2,
        pad_token_id=0,
    )
    with torch.device("meta"):  # else drawing it would take the most memory
        model = transformers.LlamaForSequenceClassification(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(0.01)  # touched, so that it is in memory
    numbers = sum(parameter.numel() for parameter in model.parameters())
    before = _peak()
    start = time.perf_counter()
    net = rankup.grow(model, rankup.Rank(8, 2), base="keep", copy=copy)
    seconds = time.perf_counter() - start
    assert net.dtype == torch.float32
    return {
        "numbers": numbers,
        "seconds": round(seconds, 2),
        "peak_over_base": round(_peak() / before, 3),
        "bytes_before": before,
    }


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(copy=sys.argv[1] == "copied")))
    else:
        measured = {}
        for way in ("taken over", "copied"):
            done = subprocess.run(
                [sys.executable, __file__, way], capture_output=True, text=True, check=True
            )
            measured[way] = json.loads(done.stdout.splitlines()[-1])
            print(way, measured[way])
        print(write_result("large", measured, threads=str(torch.get_num_threads())))
