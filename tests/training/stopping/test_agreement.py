"""The stop agreement: all ranks stop after the same step, whichever rank is signalled, and whenever."""

import os
import random
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from slurmddp.errors import RankFailure
from slurmddp.training.stopping import agreement as stop
from slurmddp.training.stopping.agreement import StopAgreement, StopReason
from slurmddp.training.stopping.signals import StopSignals
from support.distributed import stop_ranks
from support.distributed.ranks import run_ranks
from support.runs.agent_runs import wait_until


@pytest.mark.distributed
@pytest.mark.usefixtures("rank_server")
def test_all_ranks_stop_after_the_same_step():
    """24 seeded rounds: one signal, two at once, twice, before the first step, in an evaluation, none.

    All rounds use one store, and no round reads an entry of an earlier round.
    """
    for lines in zip(*run_ranks(stop_ranks.train_rounds, 4, 24), strict=True):
        kind = lines[0]["kind"]
        assert len({line["stopped"] for line in lines}) == 1, lines
        assert all(line["again"] for line in lines), "once stopped, stopped for good"
        if kind == "finished":
            assert all(line["reason"] is None and line["stopped"] == 20 for line in lines)
        elif kind == "evaluation":
            evaluated = lines[0]["stopped"] > 5
            assert sum(line["left_early"] for line in lines) == evaluated
        named = {line["reason"] for line in lines}
        assert len(named) == 1, "all ranks give the same reason"
        word = {"usr2": "SIGUSR2", "request": "the test", "finished": ""}.get(kind, "SIGTERM")
        assert word in (named.pop() or "")


def steps_of(agreement, pace, asks_at):
    """Take at most 40 steps of random length, not in step with the other ranks; return how many."""
    with closing(agreement):
        for step in range(40):
            if agreement.should_stop():
                return step
            if step == asks_at:
                agreement.request("a wish")
            time.sleep(pace.uniform(0, 0.003))
        return 40


def test_agreement_over_many_seeds():
    for seed in range(25):
        chance, store = random.Random(seed), dist.HashStore()
        world_size = chance.randint(2, 6)
        asking = chance.sample(range(world_size), chance.randint(1, 2))
        asks_at = [chance.randint(0, 42) if rank in asking else None for rank in range(world_size)]
        agreements = [StopAgreement(store, rank, world_size, poll_s=0.005) for rank in range(world_size)]
        paces = [random.Random(seed * 10 + rank) for rank in range(world_size)]
        with ThreadPoolExecutor(world_size) as pool:
            steps = list(pool.map(steps_of, agreements, paces, asks_at))
        assert len(set(steps)) == 1, (seed, steps)


def test_ranks_that_do_not_answer_are_named():
    with (
        closing(StopAgreement(dist.HashStore(), 0, 4, poll_s=0.005, timeout_s=0.3)) as agreement,
        pytest.raises(RankFailure, match="rank 1, 2, 3"),
    ):
        agreement.request("a wish")
        while not agreement.should_stop():
            time.sleep(0.005)


def test_a_rank_that_has_finished_agrees_to_its_last_step():
    store = dist.HashStore()
    first = StopAgreement(store, 0, 2, poll_s=0.005)
    with closing(StopAgreement(store, 1, 2, poll_s=0.005)) as second:
        assert [first.should_stop() for _ in range(3)] == [False] * 3
        first.close()
        second.request("a wish")
        wait_until(lambda: second._posted, "the other rank posts")
        assert [second.should_stop() for _ in range(4)] == [False, False, False, True]


class Announced:
    """A lock that tells when another thread wants it."""

    def __init__(self, lock):
        self._lock, self.wanted = lock, threading.Event()

    def __enter__(self):
        self.wanted.set()
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


def test_a_rank_posts_no_number_of_steps_while_one_starts():
    with closing(StopAgreement(dist.HashStore(), 0, 2, poll_s=0.005)) as agreement:
        lock = agreement._lock
        with lock:
            agreement._lock = Announced(lock)
            agreement.request("a wish")
            wait_until(lambda: agreement._lock.wanted.is_set() or agreement._posted, "the watcher posts")
            assert not agreement._posted
        agreement._decided.set()  # The other rank never posts.


def test_rank_zero_keeps_the_store_until_all_ranks_have_read_the_decision(monkeypatch):
    store, waits = dist.HashStore(), []
    first, other = StopAgreement(store, 0, 2, poll_s=0.005), stop.AgreementStore(store, 1, 2, "")
    other.post(1)
    first.request("a wish")
    wait_until(first.should_stop, "both ranks have posted")

    def sleep(seconds):
        waits.append(seconds)
        other.mark_done()

    monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    first.close()
    assert len(waits) == 1


def watchers():
    return [thread for thread in threading.enumerate() if thread.name == "slurmddp-stop"]


@pytest.mark.distributed
def test_the_loss_of_the_store_is_warned_of_and_the_rank_obeys_its_own_signal(
    store_host, caplog, monkeypatch
):
    monkeypatch.setattr(stop, "_CLOSING_S", 0.01)
    host, store = store_host
    with StopSignals() as signals, closing(StopAgreement(store, 1, 2, signals=signals)) as agreement:
        assert not agreement.should_stop()
        host.kill()
        host.join()
        for thread in watchers():
            thread.join(60)
        assert not agreement.should_stop() and agreement.reason is None
        (said,) = caplog.messages
        assert "Rank 1" in said and "store" in said
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(
            RankFailure, match=r"SIGTERM on rank 1 .* connection to torch's store was lost"
        ) as raised:
            agreement.should_stop()
        assert isinstance(raised.value.__cause__, RuntimeError), "so that the rank's exit code is a stop's"


@pytest.mark.distributed
def test_the_loss_of_the_store_at_the_end_is_not_warned_of(store_host, caplog, monkeypatch):
    monkeypatch.setattr(stop, "_CLOSING_S", 3600.0)
    host, store = store_host
    agreement = StopAgreement(store, 1, 2, poll_s=0.01)
    host.kill()
    host.join()
    wait_until(lambda: agreement._lost, "the watcher finds the store lost")
    agreement.close()
    assert not caplog.messages


def kill_when_posted(host, store):
    """Kill the store's host when the one rank there is has told the others how far it is."""
    wait_until(lambda: store.check(["slurmddp/stop/1/posted"]), "the rank posts")
    host.kill()


@pytest.mark.distributed
def test_the_loss_of_the_store_during_the_agreement_is_a_rank_failure(store_host):
    _, store = store_host
    with closing(StopAgreement(store, 1, 2, poll_s=0.01, timeout_s=60)) as agreement:
        agreement.request("a wish")
        threading.Thread(target=kill_when_posted, args=store_host).start()
        with pytest.raises(RankFailure, match="connection to torch's store was lost"):
            while not agreement.should_stop():
                time.sleep(0.005)


@pytest.mark.distributed
def test_a_blocking_call_on_the_main_connection_does_not_delay_the_watcher(store_host):
    _, store = store_host
    blocked = threading.Thread(target=store.get, args=("late",), daemon=True)
    with closing(StopAgreement(store, 0, 2)) as first, closing(StopAgreement(store, 1, 2)) as second:
        blocked.start()
        second.request("a wish")
        wait_until(lambda: first.should_stop() and second.should_stop(), "both stop")
        assert blocked.is_alive() and first.reason == second.reason == StopReason(
            "a wish", "a wish on rank 1", 1
        )
    other = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    other.set("late", "now")
    blocked.join(60)


def test_a_single_rank_stops_at_the_next_step_after_a_signal():
    with StopSignals() as signals, closing(StopAgreement(None, signals=signals)) as agreement:
        assert [agreement.should_stop(), agreement.requested, agreement.reason] == [False, False, None]
        os.kill(os.getpid(), signal.SIGTERM)
        assert [agreement.should_stop(), agreement.should_stop(), agreement.requested] == [True, True, True]
        assert agreement._started == 1
        assert "SIGTERM on rank 0" in agreement.reason.text
        assert watchers() == []


def test_an_open_agreement_does_not_keep_the_process_alive(store_host, forked_python):
    program = (
        "import sys, torch.distributed as dist\n"
        "from slurmddp.training.stopping.agreement import StopAgreement\n"
        "store = dist.TCPStore('127.0.0.1', int(sys.argv[1]), is_master=False, wait_for_workers=False)\n"
        "agreement = StopAgreement(store, 0, 2, poll_s=0.0)\n"
        "print(agreement.should_stop())\n"
    )
    command = [forked_python, "-c", program, str(store_host[1].port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
