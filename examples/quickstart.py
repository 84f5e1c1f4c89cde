"""Learns five tasks one after another, and shows that none is forgotten.

python examples/quickstart.py --stream p-digits
"""

import argparse

import rankup


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stream", default="s-digits", help="as `rankup run --stream` takes it")
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()

    stream = rankup.data.make_stream(options.stream)
    module = rankup.models.mlp(stream[0].train_x[0].numel(), hidden=[256, 256])
    net = rankup.grow(module, rank=rankup.Rank(first=11, step=1))

    when_learned = {}
    for task in stream:
        rankup.fit(net, task, rankup.Recipe(epochs=options.epochs))
        when_learned[task.name] = rankup.accuracy(net, task)

    print("task          when learned   after all tasks")
    for task in stream:
        print(f"{task.name:12} {when_learned[task.name]:13.2%} {rankup.accuracy(net, task):17.2%}")
    print(f"{net.size().total:,} numbers stored for {len(net.tasks)} tasks")


if __name__ == "__main__":
    main()
