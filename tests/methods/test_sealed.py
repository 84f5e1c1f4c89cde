"""Files of rivals that were edited, damaged or left half written: refused in one sentence, and all
is well once they are put back."""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import rankup
from helpers.edited import broken, misfits, weights_in
from helpers.methods import EXPECTED, answers
from rankup.layers import Tensors
from rankup.methods import METHODS
from rankup.methods.base import Method
from rankup.methods.shared import weights_file
from rankup.methods.shared.bits import pack, unpack
from rankup.methods.shared.weights_file import About, write_weights
from rankup.testing import NETS, learn, make_method, split_digits

RIVALS = [name for name in METHODS if name != "rank"]
STREAM = split_digits(3)


class Saved:
    """A method that has learned two tasks, and its folder."""

    def __init__(self, name: str, folder: Path, net: str = "mlp") -> None:
        expected = EXPECTED[name]
        # Layers of odd widths, whose masks do not fill their last bytes.
        module = rankup.models.mlp(64, hidden=[19, 14]) if net == "mlp" else NETS[net]()
        recipe = {"epochs": 4, **expected.recipe}
        self.method = make_method(name, STREAM, module, options=expected.options, **recipe)
        learn(self.method, STREAM, 2)
        self.method.save(folder)
        self.folder, self.weights = folder, weights_in(folder)
        self.manifest = self.weights.with_name("manifest.json")
        self.about = json.loads(self.manifest.read_bytes())
        self.whole = {path: path.read_bytes() for path in (self.weights, self.manifest)}

    @property
    def tensors(self) -> Tensors:
        return safetensors.torch.load(self.whole[self.weights])

    def load(self) -> Method:
        return type(self.method).load(self.folder, self.method.setting)

    def refuses(self) -> str:
        with pytest.raises(rankup.StoreError) as caught:
            self.load()
        assert str(caught.value).isprintable()
        return str(caught.value)

    def reseal(self, tensors: Tensors, tasks: int | None = None, of: str | None = None) -> None:
        """Write other tensors with hashes that fit."""
        tasks = self.about["tasks"] if tasks is None else tasks
        write_weights(self.weights.parent, tensors, About(of or self.about["of"], tasks))

    def restore(self) -> None:
        for path in self.weights.parent.iterdir():
            path.unlink()
        for path, content in self.whole.items():
            path.write_bytes(content)


@pytest.fixture(scope="module")
def all_saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    made: dict[str, Saved] = {}

    def saved(name: str) -> Saved:
        if name not in made:
            made[name] = Saved(name, tmp_path_factory.mktemp(name) / "net")
        return made[name]

    return saved


@pytest.fixture
def saved(
    request: pytest.FixtureRequest, all_saved: Callable[[str], Saved], unsynced: None
) -> Iterator[Saved]:
    method = all_saved(request.param)
    yield method
    method.restore()
    loaded = method.load()
    for task in range(2):
        wanted = answers(method.method, STREAM, task)
        assert torch.equal(answers(loaded, STREAM, task), wanted)


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the disk would take longer than all the rest."""
    monkeypatch.setattr("os.fsync", lambda _: None)


def of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("saved", names, indirect=True)


def says_same(one: bytes, other: bytes) -> bool:
    """As JSON, but for space."""
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


@of(*RIVALS)
def test_damaged_files_are_refused(saved: Saved) -> None:
    draw = random.Random(saved.about["of"])
    for path, content in saved.whole.items():
        for damaged in broken(content, draw):
            path.write_bytes(damaged)
            if path != saved.manifest or not says_same(damaged, content):
                assert str(path) in saved.refuses()
        path.write_bytes(content)


@of(*RIVALS)
def test_misfits_are_refused_though_hashes_fit(saved: Saved) -> None:
    for edited in misfits(saved.tensors, random.Random(saved.about["of"])):
        saved.reseal(edited)
        assert "does not hold what this method, network and stream need: " in saved.refuses()


@of(*RIVALS)
def test_other_numbers_of_tasks_are_refused(saved: Saved) -> None:
    for tasks in {0, 1, 2, 3, 4, 100_000} - {saved.about["tasks"]}:
        saved.reseal(saved.tensors, tasks)
        saved.refuses()


@of(*RIVALS)
def test_other_seeds_and_methods_are_refused(saved: Saved) -> None:
    own = saved.about["of"]
    saved.reseal(saved.tensors, of=f"{own}1")
    assert saved.refuses().endswith(f"manifest.json belongs to {own}1, not to {own}")


@pytest.mark.slow
@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("net", ["mlp", "convnet"])
def test_no_edit_ends_in_a_traceback(name: str, net: str, tmp_path: Path, unsynced: None) -> None:
    """Of files with hashes that fit, some are taken: floats may have any value."""
    saved = Saved(name, tmp_path / "net", net)
    for seed in range(3):
        draw = random.Random(seed)
        for edited in misfits(saved.tensors, draw):
            saved.reseal(edited)
            saved.refuses()
        for damaged in broken(saved.whole[saved.weights], draw):
            saved.restore()
            saved.weights.write_bytes(damaged)
            reseal_file(saved)
            try:
                loaded = saved.load()
            except rankup.StoreError:
                saved.refuses()
                continue
            for task in range(2):
                answers(loaded, STREAM, task)
            if loaded.learned < 3:
                loaded.begin(STREAM[2])


def reseal_file(saved: Saved) -> None:
    content = saved.weights.read_bytes()
    file = weights_file.File.of(saved.weights.name, content)
    about = About(saved.about["of"], saved.about["tasks"])
    saved.manifest.write_bytes(weights_file._Manifest(about, file).to_bytes())


# Values that a method would index with or divide by.


def refused(saved: Saved, name: str, change: Callable[[Tensor], Tensor]) -> str:
    """What is said of a file in which a tensor was changed."""
    tensors = saved.tensors
    saved.reseal({**tensors, name: change(tensors[name].clone()).contiguous()})
    return saved.refuses().partition("need: ")[2]


@of("packnet")
def test_owners_that_do_not_exist_are_refused(saved: Saved) -> None:
    def to_third_task(packed: Tensor) -> Tensor:
        owners = unpack(packed, 2, 14 * 19)
        owners[5] = 3
        return pack(owners, 2)

    name = "kept/hidden.1.weight.owners"
    said = refused(saved, name, to_third_task)
    assert said == f"{name!r} gives weights to task 3, but 2 are learned"


@pytest.mark.parametrize(
    ("saved", "name"),
    [
        ("packnet", "kept/hidden.1.weight.owners"),
        ("hat", "kept/masks"),
        ("supsup", "1/hidden.1.mask"),
        ("wsn", "kept/hidden.1.weight.masks"),
    ],
    indirect=["saved"],
)
def test_bits_after_the_last_are_refused(saved: Saved, name: str) -> None:
    def set_last(packed: Tensor) -> Tensor:
        packed[..., -1] |= 128
        return packed

    assert re.fullmatch(f"'{name}' has bits set after its \\d+th", refused(saved, name, set_last))


@of("ibpwf")
def test_selections_of_other_factors_are_refused(saved: Saved) -> None:
    said = refused(saved, "0/hidden.0.selection", lambda packed: packed ^ 1)
    assert "expected" in said
    assert said.endswith("as many as the task selects")
    assert "too large" in refused(saved, "1/hidden.0.sticks", lambda sticks: sticks + 1e30)


@of("icarl")
def test_more_exemplars_than_the_budget_are_refused(saved: Saved) -> None:
    said = refused(saved, "buffer/1/0", lambda images: images.repeat(2, 1, 1, 1))
    assert said == "'buffer/1/0' is of shape [50, 1, 8, 8], expected [1 to 25, 1, 8, 8]"
    assert "[0, 1, 8, 8], expected" in refused(saved, "buffer/1/0", lambda images: images[:0])


@of("der")
def test_samples_of_classes_to_come_are_refused(saved: Saved) -> None:
    said = refused(saved, "buffer/classes", lambda classes: classes + 3)
    assert said == "'buffer/classes' holds numbers from 3 to 6, expected 0 to 3"


@of("ewc")
def test_negative_importance_is_refused(saved: Saved) -> None:
    assert "expected 0 to inf" in refused(saved, "kept/importance", lambda t: t - 1)


@pytest.mark.parametrize(
    ("name", "variance"), [("finetune", "shared/1.running_var"), ("hat", "0/1.var")]
)
def test_negative_variance_is_refused(
    name: str, variance: str, tmp_path: Path, unsynced: None
) -> None:
    saved = Saved(name, tmp_path, "convnet")
    assert "expected 0 to inf" in refused(saved, variance, lambda var: -var - 1)


class Masked(nn.Module):
    """Has a buffer that is infinite in places."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 6), nn.Linear(6, 10)
        self.register_buffer("mask", torch.tensor([0.0, 0, 0, 0, 0, -torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.hidden(x.flatten(1)) + self.mask).relu())


def test_buffers_that_were_infinite_may_stay_so(tmp_path: Path) -> None:
    method = make_method("finetune", STREAM, Masked())
    method.save(tmp_path)
    type(method).load(tmp_path, method.setting)
    tensors = safetensors.torch.load_file(weights_in(tmp_path))
    assert tensors["shared/mask"][5] == -torch.inf
    tensors["shared/mask"][0] = torch.inf
    write_weights(tmp_path, tensors, About("FineTune with seed 0", 0))
    with pytest.raises(rankup.StoreError, match="'shared/mask' holds numbers that are not finite"):
        type(method).load(tmp_path, method.setting)
