"""The options of the torchrun that an agent starts."""

from __future__ import annotations

from typing import Any

import pytest

from slurmddp.environments.rank_info import RankInfo
from slurmddp.launchers.agent.torchrun import arguments

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
