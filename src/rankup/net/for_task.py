"""A network as a module for one of its tasks, for tools that take any module."""

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rankup.net.settings import config_for

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet


class TaskModule(nn.Module):
    """A network that runs for one task, called as the given module is called.

    `parameters()` and `state_dict()` hold only what is being learned for the task: nothing that was
    learned before, and after the commit nothing. Other attributes, such as
    `gradient_checkpointing_enable`, are those of the given module.
    """

    def __init__(self, net: "IncrementalNet", task: str) -> None:
        super().__init__()
        self.net, self.task = net, task
        self.training = net.training
        self.register_state_dict_post_hook(_keep_learned)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_frozen)  # type: ignore[no-untyped-call]

    @property
    def device(self) -> torch.device:
        return self.net.device

    @property
    def dtype(self) -> torch.dtype:
        return self.net.dtype

    @property
    def config(self) -> Any:
        """The config of a module of transformers, with the task's classes."""
        return config_for(self.net.body, self.net._tasks.width(self.task))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        if self.net.learning == self.task:
            yield from super().named_parameters(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "net":
                raise
            return getattr(self.net.body, name)

    def _run(self, *args: Any, **options: Any) -> Any:
        names = list(inspect.signature(self.net.body.forward).parameters)
        options |= dict(zip(names[1:], args[1:], strict=False))
        return self.net(*args[:1], task=self.task, **options)


def for_task(net: "IncrementalNet", task: str) -> TaskModule:
    # A class of its own, because transformers' Trainer reads the signature of the class's forward.
    def forward(self: TaskModule, *args: Any, **options: Any) -> Any:
        return self._run(*args, **options)

    body = type(net.body)
    forward.__signature__ = inspect.signature(body.forward)  # type: ignore[attr-defined]
    kind: Any = type(f"{body.__name__}ForTask", (TaskModule,), {"forward": forward})
    module: TaskModule = kind(net, task)
    return module


def _learned_names(module: TaskModule, prefix: str) -> set[str]:
    net = module.net
    if net.learning != module.task:
        return set()
    names = {name for name, _ in net.named_parameters(remove_duplicate=False)}
    if not net._shared.is_constant:  # statistics that shared norms take in the first task
        names |= {f"body.{name}" for name, _ in net._shared.spec.tensors}
    return {f"{prefix}net.{name}" for name in names}


def _keep_learned(
    module: nn.Module, state_dict: dict[str, Tensor], prefix: str, metadata: Any
) -> None:
    assert isinstance(module, TaskModule)
    learned = _learned_names(module, prefix)
    for name in [n for n in state_dict if n.startswith(f"{prefix}net.") and n not in learned]:
        del state_dict[name]


def _add_frozen(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Add all frozen tensors, which are in no state dict, so that none is missing when it is
    loaded."""
    assert isinstance(module, TaskModule)
    learned = _learned_names(module, prefix)
    for name, tensor in module.net.state_dict(prefix=f"{prefix}net.").items():
        if name not in learned:
            state_dict[name] = tensor
