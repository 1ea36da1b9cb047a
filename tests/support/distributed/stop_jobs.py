"""Rank programs of test_controller: ranks that are asked to stop in several ways."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from slurmddp.host import process
from slurmddp.training import rank_main
from slurmddp.training.stopping import exit_guard
from support.distributed import rank_jobs
from support.runs.agent_runs import wait_until


def all_have_come(place: str) -> None:
    """Wait until all ranks have called this function for the same `place`."""
    folder = Path(os.environ["SLURMDDP_RUN_DIR"])
    (folder / f"{place}-{os.environ['RANK']}").touch()
    ranks = int(os.environ["WORLD_SIZE"])
    wait_until(lambda: len(list(folder.glob(f"{place}-*"))) == ranks, f"all ranks come to {place}")


class Countdown(torch.utils.data.Dataset[Any]):
    """Data set of random classes.

    Read number `at` on rank `rank` (-1: on all ranks) calls the method `act`.
    """

    act = ""
    at = 0
    rank = 0
    _read = 0

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        type(self)._read += 1
        if self._read == self.at and self.rank in (-1, int(os.environ["RANK"])):
            getattr(self, self.act)()
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), torch.randint(3, (), generator=generator)

    def write_stop_file(self) -> None:
        Path(os.environ["SLURMDDP_RUN_DIR"], "stop").touch()

    def write_stop_file_and_signal(self) -> None:
        self.write_stop_file()
        os.kill(os.getpid(), signal.SIGUSR2)

    def terminate_all(self) -> None:
        all_have_come("terminate")
        os.kill(os.getpid(), signal.SIGTERM)

    def nothing(self) -> None:
        pass


class WithHeldout(Countdown):
    def heldout(self) -> Countdown:
        return Countdown()


def work(folder: str, act: str, at: int, rank: int, environ: dict[str, str]) -> int:
    """Run a rank whose data set calls `act` at read number `at` on `rank` (see `Countdown`).

    Return its exit code.
    """
    os.environ.update({"SLURMDDP_RUN_DIR": folder, "SLURMDDP_ATTEMPT": "0", **environ})
    Countdown.act = act
    Countdown.at = at
    Countdown.rank = rank
    return rank_main.main(folder)


def isolated(folder: str, act: str, at: int, rank: int, environ: dict[str, str]) -> tuple[int, str]:
    """Run `work` in a child process, which may exit at any time; return its exit code and output."""
    reader, writer = os.pipe()
    parent = os.getpid()
    if (pid := os.fork()) == 0:
        process.die_with_parent(signal.SIGKILL, parent)
        os.dup2(writer, 1)
        os.dup2(writer, 2)

        try:
            code = work(folder, act, at, rank, environ)
        except BaseException:
            traceback.print_exc()
            code = 99

        sys.stderr.flush()
        os._exit(code)

    os.close(writer)
    with open(reader, errors="replace") as output:
        text = output.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


class SlowToBuild(rank_jobs.Net):
    """A model that takes a minute to build; rank 0 is asked to stop first, the others a moment later."""

    def __init__(self) -> None:
        super().__init__()
        all_have_come("build")
        time.sleep(0.1 * int(os.environ["RANK"]))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


class EarlyOnOne(rank_jobs.Net):
    """A model whose last rank alone is asked to stop during the build."""

    def __init__(self) -> None:
        super().__init__()
        exit_guard.PATIENCE_S = 600  # The start may be slow here.
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            os.kill(os.getpid(), signal.SIGTERM)


class StopFile(rank_jobs.Net):
    """A model during whose construction `slurmddp stop` requests a stop."""

    def __init__(self) -> None:
        super().__init__()
        Path(os.environ["SLURMDDP_RUN_DIR"], "stop").touch()


class SlowToStart(rank_jobs.Net):
    """A model during whose build rank 0 ends; the others wait for it, and receive the stop only later."""

    def __init__(self) -> None:
        super().__init__()
        all_have_come("start")
        if os.environ["RANK"] == "0":
            os._exit(75)
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()


class SlowToSave(rank_jobs.Net):
    """A model whose state takes a minute to collect once a sample has asked for a stop."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if Countdown._read >= Countdown.at:
            time.sleep(60)
        return super().state_dict(*args, **kwargs)
