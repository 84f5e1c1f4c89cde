"""A method saved while it is tested is saved as it is, without what the test changes."""

from pathlib import Path

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from helpers.methods import answers, make
from helpers.runs import config_for
from rankup.data.streams import Stream, make_stream
from rankup.methods import METHODS
from rankup.runs.run import run_together
from rankup.runs.seed_run import SeedRun


@pytest.fixture(scope="module")
def stream() -> Stream:
    return make_stream("p-digits", tasks=2)


def files(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize("name", METHODS)
def test_save_in_middle_of_answer_is_one_before_it(
    name: str, stream: Stream, tmp_path: Path
) -> None:
    method = make(name, stream, epochs=1)
    while method.learned < 2:
        method.learn(stream[method.learned], None, None)
    method.save(tmp_path / "before")
    # Like a thread that writes while another one tests.
    left = [method.saving(tmp_path / "within")]
    hook = register_module_forward_hook(lambda *_: left.pop()() if left else None)
    try:
        answers(method, stream, 0)
    finally:
        hook.remove()
    assert not left
    assert files(tmp_path / "within") == files(tmp_path / "before")


def test_what_is_saved_is_taken_before_first_test(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for what in ("saving", "test"):

        def noted(run: SeedRun, what: str = what, own: object = getattr(SeedRun, what)) -> object:
            done.append(what)
            return own(run)

        monkeypatch.setattr(SeedRun, what, noted)
    threads = torch.get_num_threads()
    runs = [SeedRun(config_for(stream, "packnet"), stream, tmp_path / f"{n}") for n in range(2)]
    assert run_together(runs) == {}
    torch.set_num_threads(threads)
    assert done == ["saving", "saving", "test", "test"] * 2
