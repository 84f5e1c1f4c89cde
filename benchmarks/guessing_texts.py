"""CLINC150 without being told the domain, and its out-of-scope requests, with a kept MiniLM.

    PYTHONPATH=src python3 benchmarks/guessing_texts.py MINILM DATA --seeds 5

The base is kept and runs once over all texts; tasks learn on its mean features. With `--held-out`
the validation texts stand for the test texts: settings are chosen by these. Out-of-scope texts are
those of the test split alone.
"""

import argparse
import random
import statistics
from pathlib import Path

import pyarrow.parquet
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import rankup

OUT = "out of scope"
Split = dict[str, list[tuple[int, str]]]  # by domain: the rows and intents of its texts


def features(folder: str, texts: list[str]) -> Tensor:
    """`[N, 384]`: MiniLM's mean over tokens."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
    rows = []
    with torch.no_grad():
        for start in range(0, len(texts), 128):
            given = tokenizer(
                texts[start : start + 128], padding=True, truncation=True, return_tensors="pt"
            )
            mask = given["attention_mask"][..., None].float()
            hidden = model(**given).last_hidden_state
            rows.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.cat(rows)


def read(given: argparse.Namespace, split: str) -> tuple[Tensor, Split]:
    table = pyarrow.parquet.read_table(
        Path(given.data) / f"clinc150/data/{split}-00000-of-00001.parquet"
    ).to_pylist()
    by_domain: Split = {}
    for number, row in enumerate(table):
        by_domain.setdefault(row["domain"], []).append((number, row["intent"]))
    cached = Path(given.cache) / f"clinc150-{split}.pt"
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        torch.save(features(given.model, [row["text"] for row in table]), cached)
    return torch.load(cached), by_domain


def kept_base() -> nn.Module:
    """The base's features as a layer that is kept, and a head."""
    kept = nn.Linear(384, 384)
    with torch.no_grad():
        kept.weight.copy_(torch.eye(384))
        kept.bias.zero_()
    return nn.Sequential(kept, nn.Linear(384, 15))


def tasks_of(train: tuple[Tensor, Split], test: tuple[Tensor, Split]) -> list[rankup.Task]:
    found = []
    for domain in sorted(train[1].keys() - {OUT}):
        names = sorted({intent for _, intent in train[1][domain]})
        sides = []
        for x, rows in ((train[0], train[1][domain]), (test[0], test[1][domain])):
            places = torch.tensor([number for number, _ in rows])
            sides += [x[places], torch.tensor([names.index(intent) for _, intent in rows])]
        found.append(rankup.Task(domain, len(names), *sides, class_names=tuple(names)))
    return found


@torch.no_grad()
def measure(
    net: rankup.IncrementalNet, tasks: list[rankup.Task], strange: Tensor, kept: str | None
) -> dict[str, float]:
    right, found, told, known, turned = [], [], [], [], []
    for number, name in enumerate(net.tasks):
        task = next(task for task in tasks if task.name == name)
        x, y = task.test_x, task.test_y
        answer, guess = net(x), net.guess(x)
        start = sum(list(net.classes.values())[:number])
        right.append(answer.logits.argmax(1) == y + start)
        found.append(answer.task == number)
        told.append(net(x, name).argmax(1) == y)
        known.append(guess.strangeness)
        turned.append(guess.none > 0.95)
    out = net.guess(strange)
    scores = torch.cat([*known, out.strangeness])
    if kept:
        torch.save({"of a known domain": torch.cat(known), OUT: out.strangeness}, kept)
    labels = [0] * (len(scores) - len(strange)) + [1] * len(strange)
    share = {"told": told, "untold": right, "task": found, "turned away": turned}
    numbers = {name: torch.cat(each).float().mean().item() for name, each in share.items()}
    numbers["AUROC"] = float(roc_auc_score(labels, scores.numpy()))
    numbers["noticed"] = (out.none > 0.95).float().mean().item()
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--cache", default="features")
    parser.add_argument("--router", default="analytic")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--scores", help="file for the strangeness of all texts")
    parser.add_argument("--held-out", action="store_true")
    given = parser.parse_args()
    train, out = read(given, "train"), read(given, "test")
    test = read(given, "validation") if given.held_out else out
    strange = out[0][torch.tensor([number for number, _ in out[1][OUT]])]
    tasks, every = tasks_of(train, test), list[dict[str, float]]()
    for seed in range(given.seed, given.seed + given.seeds):
        order = random.Random(seed).sample(tasks, len(tasks))
        net = rankup.grow(
            kept_base(), rankup.Rank(8, 4), base="keep", seed=seed, router=given.router
        )
        recipe = rankup.Recipe(epochs=given.epochs, batch=64, lr=3e-3, weight_decay=0.01)
        for task in order:
            rankup.fit(net, task, recipe)
        every.append(measure(net.eval(), tasks, strange, given.scores))
        print(seed, {name: round(100 * value, 2) for name, value in every[-1].items()}, flush=True)
    size = net.size()
    print(f"numbers without the base {(size.bytes - 4 * 384 * 385) / 4:,.0f}, "
          f"of routers {size.router_bytes / 4:,.0f}")  # fmt: skip
    if len(every) > 1:
        for name in every[0]:
            values = [100 * each[name] for each in every]
            print(f"{name}: {statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}")


if __name__ == "__main__":
    main()
