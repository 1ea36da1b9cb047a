"""A rank from its environment to its exit code."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from slurmddp.environments.time_limits import TimeLimits
from slurmddp.errors import CheckpointError, ConfigError, RankFailure
from slurmddp.runs.failures.capture import tail_of
from slurmddp.runs.failures.causes import find_cause
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.training import rank_main
from slurmddp.training.rank_main import is_lost_rank
from slurmddp.training.stopping.exit_guard import ExitGuard
from slurmddp.training.stopping.signals import StopSignals
from support.distributed import worker_jobs
from support.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]

OWN = {"_target_": "support.own.strategy.MeanOfEachGradient"}


def make_run(folder: Path, **config: Any) -> str:
    worker_jobs.write_config(RunFolder(folder), **config)
    return str(folder)


def program(name: str, **options: Any) -> dict[str, Any]:
    return {"_target_": f"support.distributed.worker_jobs.{name}", **options}


def test_a_users_program_gets_distributon_config_and_folder(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, program=program("program_that_notes", size=[1], made={"_target_": "dict", "a": 1})
    )
    code, said = run_ranks(worker_jobs.work, 1, run)[0]
    assert code == 0
    assert f"seed 3 in {tmp_path.name} with {{'size': [1], 'made': {{'a': 1}}}} on 1" in said


def test_d11_a_strategy_of_ones_own_trains_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, strategy=OWN | {"half": True}, program=program("program_that_notes"))
    code, said = run_ranks(worker_jobs.work, 1, run)[0]
    assert (code, "by MeanOfEachGradient" in said) == (0, True)


def test_a_failing_program_shows_its_traceback(tmp_path: Path) -> None:
    code, said = run_ranks(worker_jobs.work, 1, make_run(tmp_path, program=program("program_that_fails")))[0]
    assert code == 1
    assert "ZeroDivisionError: all of it" in said
    assert "worker_jobs.py" in said


def test_a_program_that_stops_exits_with_75(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks_per_node=2, program=program("program_that_is_told_to_stop"))
    for code, said in run_ranks(worker_jobs.work, 2, run):
        assert code == 75
        assert said.endswith("StoppedAtCheckpoint: Enough.\nAgain.\n")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"program": {"_target_": "support.distributed.worker_jobs.program_that_nots"}},
            "Did you mean program_that_notes",
        ),
        ({"program": {}}, "program has no _target_"),
        ({"program": program("program_that_notes"), "nodes": 2}, "nodes=2"),
        ({"program": program("program_that_notes"), "ranks_per_node": 3}, "3 task(s)"),
        ({"program": program("program_that_notes"), "strategy": {"name": "dpp"}}, "Did you mean ddp"),
        ({"program": program("program_that_notes"), "strategy": OWN | {"hlaf": 1}}, "Did you mean half"),
        ({"program": program("program_that_notes"), "strategy": {"_target_": "dict"}}, "no method wrap"),
    ],
)
def test_a_wrong_configuration_exits_with_78(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    code, said = run_ranks(worker_jobs.work, 1, make_run(tmp_path, **config))[0]
    assert code == 78
    assert message in said
    assert find_cause(code, None, tail_of(said)).reason == said.splitlines()[-2]


def test_the_cause_of_an_error_is_printed_before_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, program=program("program_that_notes", made={"_target_": "int", "_args_": ["x"]}))
    code, said = run_ranks(worker_jobs.work, 1, run)[0]
    assert code == 78
    assert said.index("ValueError: invalid literal") < said.index("ConfigError: program.made: int refused")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    code, said = run_ranks(worker_jobs.work, 1, str(tmp_path))[0]
    assert code == 66
    assert "not a run folder" in said


LOST = RankFailure("Rank 0 went away.")


@pytest.mark.parametrize(
    ("error", "signal", "code"),
    [
        (LOST, "SIGTERM", 75),
        (LOST, "SIGUSR2", 75),
        (LOST, None, 1),
        (RuntimeError("shapes do not match"), "SIGTERM", 1),
        (ConfigError("lr is 7 km."), "SIGTERM", 78),
    ],
)
def test_only_a_lost_peer_during_a_stop_is_no_failure(
    error: Exception, signal: str | None, code: int
) -> None:
    guard = ExitGuard(StopSignals(), TimeLimits())
    guard.begin()
    guard.signals.received = signal
    assert rank_main._code_after(error, guard) == code


GLOO = "/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp"


@pytest.mark.parametrize(
    "text",
    [
        f"[{GLOO}/pair.cc:553] Connection closed by peer [127.0.0.1]:53439. This is typically caused by a "
        "remote worker crashing. Check the logs of the remote worker before reporting an error. GLHF! 🏖️",
        f"[{GLOO}/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete",
        f"[{GLOO}/pair.cc:525] Read error [127.0.0.1]:4711: Connection reset by peer",
        "Application timeout caused pair closure",
    ],
)  # fmt: skip
def test_gloos_messages_about_a_lost_rank_are_recognised(text: str) -> None:
    assert is_lost_rank(RuntimeError(text))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Could not restore the optimizer"),
        RuntimeError("The feature store has no such table; nothing was stored."),
        RuntimeError("No peer review of sample 17; the database connection of the store is lost."),
        RuntimeError("See [docs/gloo/pair.cc:1] Connection closed by peer in the manual"),
        RuntimeError(f"[enforce fail at {GLOO}/pair.cc:446] op.preamble.length <= op.nbytes. 400 vs 16"),
        RuntimeError("wait timeout after 300000ms, keys: /restored"),
        ConnectionResetError(104, "Connection reset by peer"),
        OSError(107, "Transport endpoint is not connected: /mnt/store"),
        CheckpointError("The checkpoint could not be restored from the store."),
        NotImplementedError("nccl"),
        None,
    ],
)
def test_similar_errors_are_not_a_lost_rank(error: Exception | None) -> None:
    assert not is_lost_rank(error)


def test_the_store_of_a_dead_rank_is_a_lost_rank(store_host) -> None:
    host, store = store_host
    with pytest.raises(RuntimeError) as late:
        store.wait(["key"], timedelta(seconds=0.1))
    host.kill()
    host.join()
    with pytest.raises(RuntimeError) as gone:
        store.get("key")
    assert is_lost_rank(late.value)
    assert is_lost_rank(gone.value)


def test_an_error_caused_by_a_lost_rank_is_recognised() -> None:
    behind = ValueError("a program's own")
    behind.__cause__ = RankFailure("Rank 0 went away.")
    assert is_lost_rank(behind)
