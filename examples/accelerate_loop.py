"""A task learned with accelerate, saved in the middle and resumed.

python examples/accelerate_loop.py
"""

import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator

import rankup


def main() -> None:
    torch.manual_seed(0)
    net = rankup.grow(rankup.models.mlp(64, hidden=[64]), rankup.Rank(first=8, step=2))
    task = rankup.data.make_stream("s-digits")[0]
    x, y = rankup.data.to_float(task.train_x), task.train_y

    net.begin_task(task.name, task.classes)
    accelerator = Accelerator(cpu=True)
    module = net.for_task(task.name)
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-2)
    module, optimiser = accelerator.prepare(module, optimiser)

    def learn(steps: int) -> None:
        for _ in range(steps):
            optimiser.zero_grad()
            accelerator.backward(F.cross_entropy(module(x), y))
            optimiser.step()

    with tempfile.TemporaryDirectory() as folder:
        learn(30)
        accelerator.save_state(folder)
        learn(20)
        expected = [parameter.clone() for parameter in net.parameters()]
        accelerator.load_state(folder)
        learn(20)
        same = all(map(torch.equal, expected, net.parameters()))
    print(f"resumed: {'the same bits' if same else 'other bits'}")
    net.commit_task()
    print(f"{task.name}: {rankup.accuracy(net.eval(), task):.2%}")


if __name__ == "__main__":
    main()
