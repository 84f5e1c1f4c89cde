"""Curves in TensorBoard, Weights & Biases and MLflow, by their own libraries, in local folders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rankup
from helpers.calling import Call
from helpers.own_images import own_images
from rankup.training import logs

Points = dict[str, list[tuple[int, float]]]

TASKS = list(rankup.data.make_stream("s-digits"))[:2]
QUICK = rankup.Recipe(epochs=3)

pytestmark = pytest.mark.filterwarnings("ignore")  # what these libraries say of themselves


def of_tensorboard(folder: Path, name: str) -> Points:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder / name)).Reload()
    return {
        key: [(event.step, event.value) for event in events.Scalars(key)]
        for key in events.Tags()["scalars"]
    }


def of_mlflow(folder: Path, name: str) -> Points:
    client = pytest.importorskip("mlflow").MlflowClient(f"sqlite:///{folder.absolute()}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'rankup'")
    runs = client.search_runs([experiment.experiment_id])
    (run,) = (run for run in runs if run.info.run_name == name)
    assert run.info.status == "FINISHED"
    return {
        key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }


def of_wandb(folder: Path, name: str) -> Points:
    store: Any = pytest.importorskip("wandb.sdk.internal.datastore").DataStore()
    pb: Any = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    store.open_for_scan(str(file))
    points: Points = {}
    while (data := store.scan_data()) is not None:
        record = pb.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            assert record.run.display_name == name
        items = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for key, value in items.items():
            if key != "step" and not key.startswith("_"):
                points.setdefault(key, []).append((items["step"], value))
    return points


READ: dict[str, Callable[[Path, str], Points]] = {
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
    "mlflow": of_mlflow,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("tool", READ)
def test_every_epoch_of_every_task_is_a_point(tool: str, tmp_path: Path) -> None:
    pytest.importorskip(tool)
    net = rankup.grow(rankup.models.mlp(64, hidden=[16]), rankup.Rank(2, 1))
    losses: Points = {}
    with rankup.Log(tool, tmp_path / "curves", name="two/tasks", settings={"epochs": 3}) as log:

        def both(epoch: rankup.Epoch, checkpoint: rankup.Checkpoint) -> None:
            log(epoch, checkpoint)
            task = f"loss/{net.learning}"
            losses.setdefault(task, []).append((epoch.number, epoch.loss))

        for task in TASKS:
            rankup.fit(net, task, QUICK, on_epoch=both)
        log.scalars({"accuracy": 0.75}, step=2)
    points = READ[tool](tmp_path / "curves", "two/tasks")
    assert points.keys() == {"loss/split 01", "loss/split 02", "accuracy"}
    for key, expected in {**losses, "accuracy": [(2, 0.75)]}.items():
        assert [step for step, _ in points[key]] == [step for step, _ in expected]
        assert [v for _, v in points[key]] == pytest.approx([v for _, v in expected], rel=1e-6)


def test_learning_is_drawn(tmp_path: Path, call: Call) -> None:
    pytest.importorskip("tensorboard")
    call("new", "nets/shop", "--net", "mlp", "--size", "6", "--width", "8")
    images = own_images(tmp_path / "photos", "a", "b")
    done = call("learn", "nets/shop", images, "--epochs", "40", "--log", "tensorboard", "--json")
    assert done.code == 0, done.err
    points = of_tensorboard(Path("logs"), "shop/photos")
    assert [step for step, _ in points["loss/photos"]] == [*range(1, 41)]
    ((step, accuracy),) = points["accuracy/photos"]
    assert step == 40
    assert accuracy == pytest.approx(json.loads(done.out)["accuracy"])


@pytest.mark.usefixtures("no_plots")
def test_runs_of_several_seeds_are_drawn_each_and_learn_the_same(
    call: Call, one_process: None
) -> None:
    pytest.importorskip("tensorboard")
    words = ("run", "--stream", "s-digits", "--tasks", "2", "--epochs", "5", "--seeds", "2")
    words = (*words, "--width", "32")
    done = call(*words, "--out", "runs/two", "--log", "tensorboard")
    assert done.code == 0, done.err
    call(*words, "--out", "runs/without")
    for seed in ("seed-0", "seed-1"):
        lines = Path("runs/two", seed, "metrics.jsonl").read_text().splitlines()
        last = json.loads(lines[-1])
        points = of_tensorboard(Path("logs"), f"two/{seed}")
        assert [step for step, _ in points["loss/split 02"]] == [1, 2, 3, 4, 5]
        assert [step for step, _ in points["average_accuracy"]] == [1, 2]
        assert points["average_accuracy"][-1][1] == pytest.approx(last["average_accuracy"])
        tested = [points[f"accuracy/split 0{task}"][-1][1] for task in (1, 2)]
        assert tested == pytest.approx(last["accuracy"])
        for name in ("two", "without"):
            manifest = Path("runs", name, seed, "net", "manifest.json")
            assert manifest.read_bytes() == Path("runs/two", seed, "net/manifest.json").read_bytes()


def test_missing_package_is_one_sentence_that_names_the_extra(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "find_spec", lambda _: None)
    for tool, extra in (("tensorboard", "log"), ("wandb", "wandb"), ("mlflow", "mlflow")):
        for words in (("run", "--out", "run"), ("learn", "net", tmp_path)):
            done = call(*words, "--log", tool)
            assert done.code == 1
            assert done.err == (
                f"rankup: a log for {tool} needs the package {tool}: pip install "
                f"'rankup[{extra}]'\n"
            )
    assert not Path("run").exists()


def test_what_a_tool_refuses_is_one_sentence(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no login\nand more lines")

    with pytest.raises(rankup.RankupError, match="a log is for one of tensorboard, wandb, mlflow"):
        rankup.Log("excel")
    monkeypatch.setitem(logs._WRITERS, logs.Tool.tensorboard, refuse)
    monkeypatch.setattr(logs, "find_spec", bool)
    with pytest.raises(rankup.RankupError, match="^tensorboard cannot begin a log: no login$"):
        rankup.Log("tensorboard")
    assert "leave it or --on out" in call("run", "--on", "ray", "--log", "tensorboard").err
