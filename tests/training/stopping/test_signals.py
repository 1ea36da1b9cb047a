"""Stop signals: a rank records them, its loader workers ignore them, and end with their rank."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slurmddp.errors import ConfigError
from slurmddp.training.stopping.signals import StopSignals, hold_in_worker, signals_held
from support.runs.agent_runs import runs, wait_until

pytestmark = pytest.mark.distributed

PROGRAM = '''
import ctypes
import os
import sys
import time

import torch

from slurmddp.training.stopping.signals import hold_in_worker, signals_held


class Stuck(torch.utils.data.Dataset):
    """Data that never comes, as from a hanging file system."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        os.write(1, b"worker %d\\n" % os.getpid())  # One write, so that lines of both workers stay whole.
        if sys.argv[1] == "fork":
            ctypes.PyDLL(None).sleep(600)  # No Python thread runs meanwhile.
        time.sleep(600)


if __name__ == "__main__":
    context, count = sys.argv[1], int(sys.argv[2])
    loader = torch.utils.data.DataLoader(
        Stuck(), num_workers=count, worker_init_fn=hold_in_worker, multiprocessing_context=context
    )
    with signals_held():
        batches = iter(loader)
    next(batches)
'''


# Only a forked worker could hold what belongs to the one before it.
@pytest.mark.parametrize(("context", "count"), [("fork", 2), ("spawn", 1), ("forkserver", 1)])
def test_workers_die_with_a_rank_that_is_killed(tmp_path: Path, context: str, count: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    rank = subprocess.Popen(
        [sys.executable, str(program), context, str(count)], stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    try:
        workers = [int(rank.stdout.readline().split()[1]) for _ in range(count)]
        assert all(map(runs, workers))
    finally:
        rank.kill()
        rank.wait()
        rank.stdout.close()
    # torch's own watchdog polls every five seconds, and only between two batches.
    wait_until(lambda: not any(map(runs, workers)), "the workers end")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_signals_only_set_a_flag_and_handlers_are_restored(number):
    def mine(*_):
        raise AssertionError("the earlier handler ran")

    before = signal.signal(number, mine)
    try:
        with StopSignals() as signals:
            assert signals.received is None
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signals.received == signal.Signals(number).name, "the first one counts"
        assert signal.getsignal(number) is mine
    finally:
        signal.signal(number, before)


def test_another_thread_sees_a_signal_while_the_main_thread_is_busy():
    with StopSignals() as signals:
        sender = subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -s USR2 {os.getpid()}"])
        blocked = dist.HashStore()
        blocked.set_timeout(timedelta(seconds=120))

        def poll():
            wait_until(signals.poll, "a signal")
            blocked.set("seen", signals.received)

        polling = threading.Thread(target=poll)
        polling.start()
        # One C call that does not come back to the interpreter until the other thread has polled.
        seen = blocked.get("seen")
        sender.wait()
        polling.join()
    assert seen == b"SIGUSR2"


def test_handlers_outside_the_main_thread_are_refused():
    with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigError, match="main thread"):
        pool.submit(StopSignals().__enter__).result()


def signal_from_elsewhere(pid, name):
    subprocess.run(["sh", "-c", f"kill -s {name} {pid}; exit 0"], check=True)


@pytest.mark.filterwarnings("default::DeprecationWarning")  # Python 3.12 warns of any fork beside threads
def test_loader_workers_ignore_the_jobs_signals():
    loader = torch.utils.data.DataLoader(
        range(4000), batch_size=4, num_workers=2, worker_init_fn=hold_in_worker, prefetch_factor=1
    )
    with signals_held():
        batches = iter(loader)
    seen = next(batches).tolist()
    for worker in batches._workers:
        for name in ("TERM", "USR2", "TERM"):
            signal_from_elsewhere(worker.pid, name)
    for batch in batches:
        seen.extend(batch.tolist())
    assert seen == list(range(4000))


@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_a_loader_worker_ends_when_its_rank_terminates_it():
    context = torch.multiprocessing.get_context("fork")
    ready = context.Event()

    def work():
        hold_in_worker(0)
        ready.set()
        time.sleep(600)

    worker = context.Process(target=work, daemon=True)
    worker.start()
    assert ready.wait(240)
    worker.terminate()
    worker.join(60)
    assert worker.exitcode == 0
