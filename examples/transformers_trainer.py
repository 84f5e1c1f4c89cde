"""Two tasks learned by transformers' Trainer: the first stopped and resumed, the best epoch kept.

python examples/transformers_trainer.py
"""

import tempfile
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EvalPrediction,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

import rankup

WORDS = 30


def texts(count: int, classes: int, place: int) -> list[dict[str, Any]]:
    """Random words; the class follows from the word at one place."""
    ids = torch.randint(WORDS, (count, 8))
    return [{"input_ids": row, "labels": int(row[place]) % classes} for row in ids]


def accuracy(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def trainer(net: rankup.IncrementalNet, task: str, data: Any, folder: str, epochs: int) -> Trainer:
    arguments = TrainingArguments(
        folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=64,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        log_level="error",
    )
    train, held_out = data
    made = Trainer(
        net.for_task(task),
        arguments,
        train_dataset=train,
        eval_dataset=held_out,
        compute_metrics=accuracy,
    )
    made.remove_callback(PrinterCallback)
    return made


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=WORDS, intermediate_size=64, pad_token_id=None, **sizes)
    module = BertForSequenceClassification(config)  # in earnest: from_pretrained(…)
    net = rankup.grow(module, rankup.Rank(first=8, step=4), base="keep")
    probe = torch.randint(WORDS, (5, 8))

    for task, classes, place in (("first word", 3, 0), ("last word", 2, -1)):
        data = texts(512, classes, place), texts(128, classes, place)
        net.begin_task(task, classes)
        with tempfile.TemporaryDirectory() as folder:
            trainer(net, task, data, folder, epochs=2).train()
            learner = trainer(net, task, data, folder, epochs=10)
            learner.train(resume_from_checkpoint=True)
            best = learner.evaluate()["eval_accuracy"]
        net.commit_task()
        print(f"{task}: {learner.state.epoch:.0f} epochs, at best {best:.2%}")
        if task == "first word":
            before = net.eval()(probe, task=task).logits
    same = torch.equal(before, net.eval()(probe, task="first word").logits)
    print(f"first word after the second task: {'the same bits' if same else 'other bits'}")


if __name__ == "__main__":
    main()
