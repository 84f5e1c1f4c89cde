"""A network for one task, as tools take it."""

import pytest
import torch
import torch.nn.functional as F

import rankup
from helpers.zoo import inputs, module, taught
from rankup.rank import Rank


def learning() -> rankup.IncrementalNet:
    net = taught("mlp")
    net.begin_task("open", 3)
    return net


def test_module_for_task_answers_and_trains_its_task_alone() -> None:
    net, x = learning(), inputs("mlp")
    for task in ("task 0", "open"):
        assert torch.equal(net.for_task(task)(x), net(x, task=task))
    assert {*net.for_task("open").parameters()} == {*net.parameters()}
    assert not [*net.for_task("task 0").parameters()]
    assert net.for_task("open").dtype == net.dtype
    assert net.for_task("open").device == net.device


def test_state_dict_holds_what_is_learned_and_loads_strictly() -> None:
    net = learning()
    own = net.for_task("open")
    state = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    assert len(state) == len([*net.parameters()]) < len(net.state_dict())
    before = net(inputs("mlp"), task="task 0")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    own.load_state_dict(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in own.state_dict().items())
    assert torch.equal(net(inputs("mlp"), task="task 0"), before)
    state.popitem()
    with pytest.raises(RuntimeError, match="Missing key"):
        own.load_state_dict(state)


def test_kinds_hold_every_parameter_once() -> None:
    net = rankup.grow(module("transformer"), Rank(2, 1))
    net.begin_task("a", 3)
    kinds = net.parameters_by_kind()
    listed = [parameter for kind in kinds.values() for parameter in kind]
    assert len(listed) == len({*listed}) == len([*net.parameters()])
    assert all(kinds[kind] for kind in ("heads", "factors", "selectors", "biases", "norms"))


def test_task_may_have_one_output() -> None:
    net = rankup.grow(module("mlp"), Rank(2, 1))
    net.begin_task("height", outputs=1)
    x = inputs("mlp")
    F.mse_loss(net(x, task="height"), torch.zeros(len(x), 1)).backward()
    net.commit_task()
    assert net.merged("height")(x).shape == (len(x), 1)


@pytest.mark.parametrize("given", [{}, {"classes": 3, "outputs": 3}, {"outputs": 0}])
def test_task_needs_classes_or_outputs(given: dict[str, int]) -> None:
    net = rankup.grow(module("mlp"), Rank(2, 1))
    with pytest.raises(rankup.RankupError, match="classes|outputs"):
        net.begin_task("a", **given)


@pytest.mark.parametrize("fold", [False, True])
def test_merged_keeps_names_unless_folded(fold: bool) -> None:
    net, given = taught("convolutions"), module("convolutions")
    plain = net.merged(0, fold=fold)
    assert (plain.state_dict().keys() == given.state_dict().keys()) == (not fold)


def test_exported_mixed_network_takes_tasks_and_any_batch() -> None:
    net, batch = taught("mlp").eval(), torch.export.Dim("batch", min=2)
    given = (inputs("mlp", batch=4),), {"task": torch.arange(4) % 3}
    shapes = {"x": {0: batch}, "task": {0: batch}}
    exported = torch.export.export(net, *given, dynamic_shapes=shapes).module()
    x, tasks = inputs("mlp", batch=7), torch.tensor([2, 0, 1, 1, 0, 2, 2])
    torch.testing.assert_close(exported(x, task=tasks), net(x, task=tasks))
