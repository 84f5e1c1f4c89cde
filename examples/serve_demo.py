"""Five small tasks to serve: which of two handwritten digits an image of 8×8 pixels shows.

python examples/serve_demo.py nets/digits && rankup serve nets/digits
"""

import sys

import rankup
from rankup.data.inputs import ImageInput


def main(folder: str = "nets/digits") -> None:
    net = rankup.grow(rankup.models.mlp(64, hidden=[64, 64]), rankup.Rank(first=8, step=1))
    net.inputs = ImageInput(8, channels=1)  # what the page does with an image that is dropped on it
    for task in rankup.data.make_stream("s-digits"):
        rankup.fit(net, task, rankup.Recipe(epochs=30))
        right = rankup.accuracy(net, task)
        net.annotate(task.name, accuracy=right, title=" or ".join(task.class_names))
        print(f"{task.name} ({', '.join(task.class_names)}): {right:.1%} right")
    rankup.save(net, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
