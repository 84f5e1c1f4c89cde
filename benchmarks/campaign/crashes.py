"""Kills, full disks and races: what others have saved stays, and the end is the same."""

import os
import random
import resource
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import rankup
from campaign import users
from campaign.cases import TRACEBACK, WRONG, Fault, done
from campaign.moments import WRITING, any_moment, at_call, die, full
from campaign.world import World, words
from rankup.errors import RankupError
from rankup.runs.checkpoints import CHECKPOINT
from rankup.runs.read import read_run

_MOST_CALLS = 150  # of a whole run, about
_SECONDS = 1.2  # that a run takes, about


def kills(world: World, draw: random.Random, folder: Path) -> None:
    ways = (_killed_by_time, _killed_at_call)
    draw.choice(ways)(world, draw, folder)


def _killed_by_time(world: World, draw: random.Random, folder: Path) -> None:
    """A run that is killed at any time, up to three times."""
    method, run, delays = draw.choice(world.killed), folder / "run", []
    for _ in range(draw.choice((1, 2, 3))):
        delays.append(draw.uniform(0, _SECONDS))
        child = _fork(lambda: _go_on(method, run))
        time.sleep(delays[-1])
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    done(f"{method} killed after {', '.join(f'{delay:.2f}' for delay in delays)} s")
    _must_end(method, run, world)


def _killed_at_call(world: World, draw: random.Random, folder: Path) -> None:
    """A run that dies at a call that changes the disk, from its begin or while it is resumed."""
    method, moment = draw.choice(world.killed), any_moment(draw, _MOST_CALLS)
    run = folder / "run"
    if begun := draw.random() < 0.5:
        world.copy(f"stopped-{method}", folder)

    def work() -> None:
        with at_call(moment, die):
            _go_on(method, run)

    done(f"{'resumed' if begun else 'new'} {method} killed at call {moment}")
    os.waitpid(_fork(work), 0)
    _must_end(method, run, world)


def saves(world: World, draw: random.Random, folder: Path) -> None:
    """A save that is killed loses no task that was saved before."""
    moment = any_moment(draw, 40)
    net = _three_tasks(world, folder)
    done(f"save killed at call {moment}")
    longer = rankup.load(world.root / "rank" / "net")

    def work() -> None:
        with at_call(moment, die):
            rankup.save(longer, net)

    os.waitpid(_fork(work), 0)
    _check_saved(world, net)
    rankup.save(longer, net)
    _check_saved(world, net, least=5)


def full_disks(world: World, draw: random.Random, folder: Path) -> None:
    """A run meets a full disk and ends in a sentence or as it should; then there is room."""
    method, run = draw.choice(world.killed), folder / "run"
    if begun := draw.random() < 0.5:
        world.copy(f"stopped-{method}", folder)
    moment, size = any_moment(draw, _MOST_CALLS), int(10 ** draw.uniform(1, 5))
    by_size = draw.random() < 0.5
    where = f"files of {size} bytes" if by_size else f"call {moment}"
    done(f"{'resumed' if begun else 'new'} {method}, full at {where}")

    def work() -> None:
        if by_size:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            _go_on(method, run, check=False)
            return
        with at_call(moment, full, WRITING):
            said = _go_on(method, run, check=False)
        users.check_said(said)

    if by_size:  # what is said would not fit, either
        os.waitpid(_fork(work), 0)
    else:
        _finish(_fork(work, tell=folder / "fault"), folder / "fault")
    if left := [path for path in folder.rglob("*.tmp") if not by_size and path.stat().st_size]:
        raise Fault(WRONG, f"it leaves {left[0]} on the full disk")
    _must_end(method, run, world)


def races(world: World, draw: random.Random, folder: Path) -> None:
    ways = (_two_resume, _read_while_written, _two_threads_save)
    draw.choice(ways)(world, draw, folder)


def _two_resume(world: World, draw: random.Random, folder: Path) -> None:
    method, wait = draw.choice(world.killed), draw.choice((0, draw.uniform(0, 0.5)))
    run = world.copy(f"stopped-{method}", folder) if draw.random() < 0.5 else folder / "run"
    done(f"two processes with {method}, {wait:.2f} s apart")
    tells = [folder / "one", folder / "other"]
    children = []
    for tell in tells:
        children.append(_fork(lambda: _go_on(method, run), tell=tell))
        time.sleep(wait)
    for child, tell in zip(children, tells, strict=True):
        _finish(child, tell)
    _must_end(method, run, world)


def _read_while_written(world: World, draw: random.Random, folder: Path) -> None:
    run = world.copy("stopped-rank", folder)
    child, seen = _fork(lambda: _go_on("rank", run)), set[int]()
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if problems := rankup.verify(run / "net").problems:
            raise Fault(WRONG, f"while it is written, verify says {problems}")
        seen.add(len(read_run(run).lines))
    done(f"read with {sorted(seen)} lines")
    _must_end("rank", run, world)


def _two_threads_save(world: World, draw: random.Random, folder: Path) -> None:
    """Networks of three tasks, of five, or another one, saved to one folder at once."""
    sources = ["rank", "stopped-rank", *draw.choices(("rank", "stopped-rank"), k=2)]
    draw.shuffle(sources)
    nets = [rankup.load(world.root / source / "net") for source in sources]
    refused: list[str] = []
    faults: list[BaseException] = []

    def save(net: rankup.IncrementalNet) -> None:
        try:
            rankup.save(net, folder / "net")
        except RankupError as error:
            refused.append(str(error))
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=save, args=(net,)) for net in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    for sentence in refused:
        users.check_sentence(sentence)
    done(f"{', '.join(sources)} saved at once, {len(refused)} refused")
    _check_saved(world, folder / "net", least=5)


def _three_tasks(world: World, folder: Path) -> Path:
    return Path(shutil.copytree(world.root / "stopped-rank" / "net", folder / "net"))


def _check_saved(world: World, net: Path, least: int = 3) -> None:
    if problems := rankup.verify(net).problems:
        raise Fault(WRONG, f"after the crash, verify says {problems}")
    found = users.answers(rankup.load(net), world.inputs["rank"])
    wanted = world.answers["rank"][: len(found)]
    if len(found) < least or not users.same(found, wanted):
        raise Fault(WRONG, f"{len(found)} tasks are left, or they answer differently")


def _go_on(method: str, run: Path, check: bool = True) -> users.Said:
    """Resume a run, or begin it if there is none."""
    begun = (run / "config.json").exists()
    said = users.resume(run) if begun else users.command(*words(method), "--out", run)
    if check:
        users.check_said(said)
    return said


def _must_end(method: str, run: Path, world: World) -> None:
    """The run goes on, and ends as if nothing had happened to it."""
    said = _go_on(method, run)
    if said.code:
        raise Fault(WRONG, f"it does not go on: {said.err}")
    users.check_ending(run, world.endings[method])
    if left := [*run.rglob("*.tmp"), *run.glob(CHECKPOINT)]:
        raise Fault(WRONG, f"{left[0]} is left behind")


def _fork(work: Callable[[], object], tell: Path | None = None) -> int:
    """A process that does something, and writes to a file what fault it found."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except Fault as fault:
        if tell:
            tell.write_text(f"{fault.kind}\n{fault.text}")
    except BaseException:
        if tell:
            tell.write_text(f"{TRACEBACK}\n{traceback.format_exc()[-3000:]}")
    finally:
        os._exit(0)


def _finish(child: int, tell: Path) -> None:
    os.waitpid(child, 0)
    if tell.exists():
        kind, _, text = tell.read_text().partition("\n")
        raise Fault(kind, text)
