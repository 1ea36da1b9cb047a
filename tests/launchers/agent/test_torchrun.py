"""The options of the torchrun that an agent starts, and its record of restarts."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.environments.rank_info import RankInfo
from slurmddp.launchers.agent import torchrun
from slurmddp.launchers.agent.torchrun import arguments
from slurmddp.runs.folder.layout import RunFolder

SECOND = RankInfo(
    environment="slurm", rank=1, node_rank=1, world_size=2, nodes=2, hosts=("n0", "n1"), launch_id="7.0.0"
)


@pytest.mark.parametrize(
    ("program", "policy", "options"),
    [
        ({}, {}, {"--max-restarts=0", "--shutdown-timeout=120"}),
        ({"resumable": True}, {}, {"--max-restarts=10"}),
        (
            {"resumable": True},
            {"max_restarts_in_place": 2, "signal_lead_s": 30, "join_timeout_s": 9},
            {
                "--max-restarts=2",
                "--shutdown-timeout=30",
                "--rdzv-conf=is_host=false,join_timeout=9,read_timeout=9",
            },
        ),
    ],
)
def test_torchrun_gets_the_policy_of_the_run(
    program: dict[str, Any], policy: dict[str, Any], options: set[str]
) -> None:
    config = {"ranks_per_node": 4, "program": {"script": "fit.py", **program}, "policy": policy}
    found = set(arguments(config, SECOND, "10.0.0.1", "20000"))
    assert options <= found
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-id=7.0.0", "--local-addr=n1"} <= found
    assert "--rdzv-endpoint=10.0.0.1:20000" in found


def test_the_first_node_is_the_host_of_the_rendezvous_at_its_own_address() -> None:
    first = RankInfo(environment="slurm", world_size=2, nodes=2, hosts=("n0", "n1"))
    found = arguments({"ranks_per_node": 1}, first, "fe80::1", "20000")
    assert {"--rdzv-endpoint=[fe80::1]:20000", "--local-addr=fe80::1"} <= set(found)
    assert any("is_host=true" in word for word in found)


def test_t11_torchrun_forwards_slurms_warning_of_the_time_limit() -> None:
    (signals,) = (
        word for word in arguments({}, SECOND, "n0", "1") if word.startswith("--signals-to-handle=")
    )
    forwarded = set(signals.partition("=")[2].split(","))
    assert forwarded == {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR2"}


def test_the_rank_that_died_is_recorded_though_its_peer_was_noticed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.log_dir(0).mkdir(parents=True)
    folder.rank_log(0, 0).write_text("RuntimeError: Connection closed by peer [10.0.0.2]:4242\n")
    folder.rank_log(0, 1).write_text("step 5\n")
    monkeypatch.setenv("SLURMDDP_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("SLURMDDP_ATTEMPT", "0")
    lost, killed = SimpleNamespace(exitcode=1), SimpleNamespace(exitcode=-9)
    # The torchrun of another node records what has killed the peer, while this one waits for that.
    other = SimpleNamespace(sleep=lambda seconds: torchrun._record_restart(folder, 1, killed))
    monkeypatch.setattr(torchrun, "time", other)
    torchrun._record_restart(folder, 0, lost)
    restarts = [event for event in folder.events() if event["event"] == "restarted"]
    assert [(event["rank"], event["generation"]) for event in restarts] == [(1, 1)]


def test_a_node_that_starts_ranks_again_without_a_failure_of_its_own_counts_the_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURMDDP_RESTART_COUNT", "0")
    counts: list[str] = []

    class Agent:
        def _start_workers(self, group: object) -> None:
            counts.append(os.environ["SLURMDDP_RESTART_COUNT"])

    torchrun._count_restarts(Agent)
    for _ in range(3):
        Agent()._start_workers(None)
    assert counts == ["0", "1", "2"]


@pytest.mark.parametrize("is_late", [False, True], ids=["seen before", "seen by torchrun first"])
def test_a_rank_that_has_stopped_by_itself_stops_all_ranks_and_is_no_failure(is_late: bool) -> None:
    class Stopped(Exception):
        pass

    rank = SimpleNamespace(poll=lambda: None if is_late else 75)

    class Agent:
        _pcontext = SimpleNamespace(subprocess_handlers={0: SimpleNamespace(proc=rank)})

        def _monitor_workers(self, group: object) -> object:
            return SimpleNamespace(failures={0: SimpleNamespace(exitcode=75)})

    torchrun._stop_with_a_rank(Agent, Stopped)
    with pytest.raises(Stopped):
        Agent()._monitor_workers(None)
