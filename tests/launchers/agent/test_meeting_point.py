"""The address and port at which ranks that bring no rendezvous of their own can meet."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Any

import pytest

from slurmddp.checkpoint.memory.service import CheckpointService
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import MismatchError
from slurmddp.host import ports
from slurmddp.host.address import LOOPBACK, Address
from slurmddp.launchers.agent.worker_group import ForkedWorkers, WorkerSpec
from slurmddp.launchers.coordinator.restart_policy import Assignment
from slurmddp.runs.folder.layout import RunFolder

ELSEWHERE = Address(socket.AF_INET, "192.0.2.1")
NODE = RankInfo(environment="slurm", nodes=2, world_size=2, hosts=("n0", "n1"), launch_id="7.0.0")


@pytest.fixture
def meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the answers for two worker groups, if node 0's name resolves at first and then no longer."""

    def among(*addresses: Address) -> list[tuple[str, int]]:
        known = [list(addresses)]
        monkeypatch.setattr(ports, "find_rank_zero", lambda node: known.pop())
        spec = WorkerSpec(RunFolder(tmp_path), 0, NODE, 1, "", 0.0, {})
        reaper: Any = None
        workers = ForkedWorkers(spec, reaper, CheckpointService(), ())
        return [workers.meeting_point(Assignment(number, (0, 1))) for number in (0, 1)]

    return among


def test_it_is_the_first_address_that_is_this_machines(meet: Any) -> None:
    met = meet(ELSEWHERE, LOOPBACK)
    assert [address for address, _ in met] == ["127.0.0.1", "127.0.0.1"]
    assert len({port for _, port in met}) == 2
    assert all(15000 <= port < 30000 for _, port in met)


def test_a_name_that_leads_elsewhere_is_told(meet: Any) -> None:
    with pytest.raises(MismatchError, match=r"'n0' is 192\.0\.2\.1, which is not an address of this machine"):
        meet(ELSEWHERE)


def test_another_error_is_not_hidden(meet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: Any, **options: Any) -> None:
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(OSError, match="too many"):
        meet(LOOPBACK)
