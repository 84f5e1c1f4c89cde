"""transformers' modules called with labels, checkpointed, and by its Trainer."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import rankup

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")


def bert() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=50, intermediate_size=32, **sizes)
    module: torch.nn.Module = transformers.BertForSequenceClassification(config)
    return module


def network() -> rankup.IncrementalNet:
    net = rankup.grow(bert(), rankup.Rank(4, 2), base="keep")
    for task, given in (("three", {"classes": 3}), ("number", {"outputs": 1})):
        net.begin_task(task, **given)
        net.commit_task()
    return net.eval()


def test_labels_give_loss_of_task_in_any_thread() -> None:
    net, x = network(), torch.randint(50, (6, 7))
    classes, numbers = torch.arange(6) % 3, torch.randn(6)

    def loss(task: str) -> tuple[torch.Tensor, torch.Tensor]:
        labels = classes if task == "three" else numbers
        found = net(task=task, input_ids=x, labels=labels)
        if task == "three":
            return found.loss, F.cross_entropy(found.logits, classes)
        return found.loss, F.mse_loss(found.logits[:, 0], numbers)

    with ThreadPoolExecutor(4) as pool:
        for found, expected in pool.map(loss, ["three", "number"] * 10):
            torch.testing.assert_close(found, expected)
    assert net.body.config.problem_type is None


def test_merged_module_survives_save_pretrained(tmp_path: Path) -> None:
    net, x = network(), torch.randint(50, (6, 7))
    plain = net.merged("three")
    assert type(plain) is transformers.BertForSequenceClassification
    assert plain.state_dict().keys() == bert().state_dict().keys()
    plain.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path).eval()
    assert loaded.config.num_labels == loaded.num_labels == 3
    torch.testing.assert_close(loaded(x).logits, net(x, task="three").logits)


def test_checkpointing_gives_same_gradients() -> None:
    net, x, found = network().train(), torch.randint(50, (6, 7)), []
    net.begin_task("next", 4)
    for switch in ("gradient_checkpointing_disable", "gradient_checkpointing_enable"):
        getattr(net.body, switch)()
        torch.manual_seed(0)
        loss = net(x, task="next").logits.square().sum()
        found.append(torch.autograd.grad(loss, [*net.parameters()]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_trainer_learns_keeps_best_and_resumes(tmp_path: Path) -> None:
    net = network().train()
    net.begin_task("next", 3)
    rows = [{"input_ids": torch.full((7,), i % 3), "labels": i % 3} for i in range(24)]

    def trainer(epochs: int) -> object:
        arguments = transformers.TrainingArguments(
            str(tmp_path), num_train_epochs=epochs, learning_rate=1e-2, use_cpu=True,
            eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
            report_to=[], disable_tqdm=True,
        )  # fmt: skip
        own = net.for_task("next")
        return transformers.Trainer(own, arguments, train_dataset=rows, eval_dataset=rows)

    first = trainer(2)
    first.train()  # type: ignore[attr-defined]
    start = first.state.log_history[0]["eval_loss"]  # type: ignore[attr-defined]
    second = trainer(6)
    assert second.train(resume_from_checkpoint=True).global_step == 18  # type: ignore[attr-defined]
    assert second.evaluate()["eval_loss"] < start  # type: ignore[attr-defined]
    net.commit_task()
