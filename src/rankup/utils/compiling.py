"""What torch.compile compiles of a network, so that it need not do so again for every task."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def run_as_it_is(function: Function) -> Function:
    """Let torch.compile begin with what this function calls: compiled itself, it would be compiled
    again for every name of a task. Where the caller is compiled, it is compiled with that."""
    # Torch has no public name for this: torch.compiler.disable would break the caller's graph.
    try:
        from torch._C._dynamo import eval_frame

        strategy, action = eval_frame._FrameExecStrategy, eval_frame._FrameAction
        eval_frame.set_code_exec_strategy(function.__code__, strategy(action.SKIP, action.DEFAULT))
    except (ImportError, AttributeError, TypeError):  # another version: compiled more often
        pass
    return function


def call(module: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """What torch.compile compiles: by itself it would begin with each layer of a `Sequential`,
    whose own forward it leaves out."""
    return module(*inputs, **options)


@run_as_it_is
def growing_parameters() -> AbstractContextManager[None]:
    """Inside, torch.compile takes sizes of parameters and buffers that were different before for
    dynamic ones, as it does with inputs: selectors and tables of factors grow with every task."""
    config: Any = sys.modules.get("torch._dynamo.config")  # not there if nothing is compiled
    if config is None or torch.compiler.is_compiling():
        return nullcontext()
    names = "force_parameter_static_shapes", "force_nn_module_property_static_shapes"
    return config.patch(dict.fromkeys(names, False))  # type: ignore[no-any-return]
