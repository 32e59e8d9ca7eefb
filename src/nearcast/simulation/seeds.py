"""Many seeds of one scenario, in several processes if asked to. Each seed's run knows nothing of the others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import msgspec

from nearcast.errors import NearcastError, SimulationLimit
from nearcast.scenario.scenario import Scenario
from nearcast.simulation.runs import Options, Outcome, difference, simulate

Finished = Callable[[Outcome], None]


class _Task(msgspec.Struct, frozen=True):
    scenario: Scenario
    seed: int
    options: Options
    verify: bool


class _Answer(msgspec.Struct, frozen=True):
    outcome: Outcome | None
    error: str | None


def run_seeds(
    scenario: Scenario,
    seeds: Sequence[int],
    options: Options = Options(),  # noqa: B008 - frozen
    *,
    jobs: int = 1,
    verify: bool = False,
    finished: Finished | None = None,
) -> list[Outcome]:
    """An outcome for every seed, in their order. ``verify`` runs each twice and once more in another process, and a difference
    is an error: something in the protocol is not determined by the seed.

    Both are needed. What one run leaves behind for the next shows only within a process; text has other hash values, and a set
    of it another order, only in another one.
    """
    found: dict[int, Outcome] = {}
    for answer in _answers([_Task(scenario, seed, options, verify) for seed in seeds], jobs):
        if answer.outcome is None:
            raise SimulationLimit(answer.error or "a run failed")
        # Where runs part is asked only of those that are run again, and a night's worth of seeds is a lot of checkpoints.
        again = verify or not answer.outcome.ok
        found[answer.outcome.seed] = answer.outcome if again else msgspec.structs.replace(answer.outcome, checkpoints=())
        if finished is not None:
            finished(answer.outcome)
    if verify:
        for answer in _answers([_Task(scenario, seed, options, False) for seed in seeds], jobs, elsewhere=True):
            if answer.outcome is None:
                raise SimulationLimit(answer.error or "a run failed")
            parted = difference(found[answer.outcome.seed], answer.outcome)
            if parted is not None:
                raise NearcastError(nondeterminism(answer.outcome.seed, parted))
    return [found[seed] for seed in seeds]


def run_verified(scenario: Scenario, seed: int, options: Options) -> Outcome:
    """One seed, twice in this process; NearcastError if the two differ."""
    first = simulate(scenario, seed, options)
    parted = difference(first, simulate(scenario, seed, options))
    if parted is not None:
        raise NearcastError(nondeterminism(seed, parted))
    return first


def nondeterminism(seed: int, parted: str) -> str:
    return (
        f"seed {seed} does not determine the run: run twice, {parted}. Look in the protocol for time.time(), functions of the "
        "random module, id(), hash() of text or iteration over sets of text, and state that outlives a run"
    )


def _answers(tasks: Sequence[_Task], jobs: int, elsewhere: bool = False) -> Iterator[_Answer]:
    if not elsewhere and (jobs <= 1 or len(tasks) <= 1):
        yield from map(_work, tasks)
        return
    others = set(multiprocessing.active_children())
    # A fresh interpreter for each: what threads or sockets this process has is not copied into them.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context, initializer=_end_with_parent)
    try:
        with _interrupts_ignored():
            futures: list[Future[_Answer]] = [executor.submit(_work, task) for task in tasks]
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool as error:
        raise NearcastError("a process that simulated was killed, perhaps for lack of memory: try --jobs 1") from error
    except BaseException:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes started meanwhile ignore Ctrl-C for good. It reaches all of a terminal's group, and only this one answers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_with_parent() -> None:
    """A process that simulates does not outlive the one that wants its answers. One that is killed cannot end it, and its
    workers would wait for ever for their next seed."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent's end", daemon=True).start()


def _work(task: _Task) -> _Answer:
    try:
        if task.verify:
            return _Answer(run_verified(task.scenario, task.seed, task.options), None)
        return _Answer(simulate(task.scenario, task.seed, task.options), None)
    except NearcastError as error:
        # As text: not every exception survives the way back from another process.
        return _Answer(None, f"seed {task.seed}: {error}")
