"""A task learned by Lightning's Trainer, stopped and resumed.

python examples/lightning_module.py
"""

import tempfile

import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import rankup


class Learner(lightning.LightningModule):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.module(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    net = rankup.grow(rankup.models.mlp(64, hidden=[64]), rankup.Rank(first=8, step=2))
    task = rankup.data.make_stream("s-digits")[0]
    data = TensorDataset(rankup.data.to_float(task.train_x), task.train_y)
    loader = DataLoader(data, batch_size=64, shuffle=True)

    net.begin_task(task.name, task.classes)
    learner = Learner(net.for_task(task.name))
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        where = {"accelerator": "cpu", "default_root_dir": folder}
        trainer = lightning.Trainer(max_epochs=5, **quiet, **where)
        trainer.fit(learner, loader)
        saved = trainer.checkpoint_callback.best_model_path
        trainer = lightning.Trainer(max_epochs=10, **quiet, **where)
        trainer.fit(learner, loader, ckpt_path=saved)
    print(f"{trainer.current_epoch} epochs")
    net.commit_task()
    print(f"{task.name}: {rankup.accuracy(net.eval(), task):.2%}")


if __name__ == "__main__":
    main()
