"""Loggers in their threads: no failure and no hang of one reaches the training."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from slurmddp.errors import ConfigError
from slurmddp.training.loggers import LoggedRun, Logger, MemoryLogger, logger_threads
from slurmddp.training.loggers.csv import CsvLogger
from slurmddp.training.loggers.logger_threads import Loggers, build
from slurmddp.training.loggers.wandb import WandbLogger


class Failing(Logger):
    def log(self, metrics, step):
        if step < 3:
            raise ConnectionError("no\nroute")
        self.last = step


class NeverStarts(Failing):
    def start(self, run):
        raise SystemExit(2)

    def log(self, metrics, step):
        raise AssertionError("not open")


class Hanging(Logger):
    free = threading.Event()

    def log(self, metrics, step):
        self.free.wait(240)


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    Hanging.free.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    Hanging.free.clear()


def test_failures_are_told_once_and_the_other_loggers_get_all_values(run: LoggedRun, monkeypatch) -> None:
    monkeypatch.setattr(logger_threads, "_WAITING", 3)
    hanging, failing, memory, told = Hanging(), Failing(), MemoryLogger(), []
    loggers = Loggers([hanging, failing, NeverStarts(), memory], run, warn=told.append)
    for step in range(1, 9):
        loggers.log({"loss": step / 2}, step)
        until = time.monotonic() + 120
        while len(memory.values.get("loss", ())) < step and time.monotonic() < until:
            time.sleep(0.001)
    hanging.free.set()
    loggers.close()
    loggers.close()
    loggers.log({"loss": 1.0}, 9)
    assert memory.values == {"loss": {step: step / 2 for step in range(1, 9)}} and memory.finished
    assert failing.last == 8, "a failure of one call is not the end of the logger"
    assert sorted(told) == [
        "The logger Failing failed: ConnectionError: no route. The training is not affected.",
        "The logger Hanging hangs: 3 calls wait for it, further values are dropped. "
        "The training is not affected.",
        "The logger NeverStarts failed: SystemExit: 2. The training is not affected.",
    ]


def test_a_logger_that_does_not_end_is_left_behind(run: LoggedRun, monkeypatch) -> None:
    monkeypatch.setattr(logger_threads, "CLOSE_S", 0.05)
    told: list[str] = []

    def full_disk(text: str) -> None:
        told.append(text)
        raise OSError(28, "No space left on device")

    loggers = Loggers([Hanging()], run, warn=full_disk)
    loggers.log({"loss": 1.0}, 1)
    loggers.close()
    assert told == [
        "The logger Hanging did not end within 0.05 s, so its last values may be missing. "
        "The training is not affected."
    ]


@pytest.mark.parametrize(
    ("resumed", "logged", "first", "continued"),
    [
        ([], 10, 10, False),
        ([None], 0, 0, False),
        ([20], 30, 21, True),
        ([20], 20, 21, True),  # The evaluation of the loaded step; its loss was logged before.
        ([1000], 10, 10, True),  # Weights of another training were loaded.
        ([40, 20], 30, 21, True),
    ],
)
def test_a_start_says_which_steps_come_again(run: LoggedRun, resumed, logged, first, continued) -> None:
    memory = MemoryLogger()
    loggers = Loggers([memory], run)
    for step in resumed:
        loggers.resumed(step)
    loggers.log({"loss": 1.0}, logged)
    loggers.close()
    assert memory.run is not None
    assert (memory.run.first_step, memory.run.is_continued) == (first, continued)


def test_a_training_that_goes_back_starts_its_loggers_again(run: LoggedRun) -> None:
    class Recorder(MemoryLogger):
        calls: ClassVar[list[str]] = []

        def start(self, run):
            self.calls.append(f"start {run.first_step}")
            super().start(run)

        def close(self, finished):
            self.calls.append(f"close {finished}")

    memory = Recorder()
    loggers = Loggers([memory], run, is_stopped=lambda: True)
    loggers.log({"loss": 1.0}, 30)
    loggers.resumed(20)
    loggers.log({"loss": 2.0}, 25)
    loggers.close()
    assert memory.calls == ["start 30", "close False", "start 21", "close False"]
    assert memory.values == {"loss": {25: 2.0}}


def test_loggers_end_before_the_exit_handlers_of_their_libraries(run: LoggedRun, monkeypatch) -> None:
    handlers: list[str] = []
    monkeypatch.setattr("atexit.register", lambda handler: handlers.append(handler.__name__))

    class WithService(MemoryLogger):
        def start(self, run):
            atexit.register(self.teardown)

        def teardown(self):
            raise AssertionError("not called here")

    loggers = Loggers([WithService()], run)
    loggers.log({"loss": 1.0}, 1)
    loggers.close()
    assert handlers == ["teardown", "close"], "the last one runs first"


def test_names_mappings_and_objects_stand_beside_each_other(tmp_path: Path) -> None:
    memory, mine = MemoryLogger(), {"_target_": f"{MemoryLogger.__module__}.MemoryLogger"}
    built = build(["csv", {"name": "wandb", "project": "x"}], ["wandb", memory, "csv", mine], None, memory)
    assert [type(one) for one in built] == [CsvLogger, WandbLogger, MemoryLogger, MemoryLogger]
    assert built[1]._options["project"] == "x" and memory in built[2:]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (MemoryLogger, "is a class, not an object"),
        ([object()], "has no method 'start'"),
        (["csvv"], "known loggers are tensorboard, csv, wandb, mlflow.*Did you mean csv"),
        ({"_target_": f"{MemoryLogger.__module__}.MemoryLogger", "size": 1}, "loggers.size is given"),
    ],
)
def test_a_logger_that_can_not_work_is_refused(given, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build(given)
