"""Each environment, shipped or a person's own, gives the ranks of a launch consistent numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import pytest

from slurmddp.environments.detect import ENVIRONMENTS, detect
from slurmddp.environments.emit import emulated_step, rank_environment
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import ConfigError, MismatchError, SlurmddpError
from support.own.environment import Kubernetes

Launch = Sequence[Mapping[str, str]]


def of_slurm(run: str) -> Launch:
    steps = [emulated_step(2, node, "7", run, 0) for node in range(2)]
    return [{**step, **rank_environment(detect(step), one, 2)} for step in steps for one in range(2)]


def of_torchrun(run: str) -> Launch:
    common = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": run}
    common |= {"MASTER_ADDR": "n1", "MASTER_PORT": "29400"}
    return [
        {**common, "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2)}
        for rank in range(4)
    ]


def of_mpirun(run: str) -> Launch:
    common = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": run}
    numbers = [{"RANK": str(rank), "LOCAL_RANK": str(rank % 2)} for rank in range(4)]
    of_ranks = [{f"OMPI_COMM_WORLD_{name}": value for name, value in one.items()} for one in numbers]
    return [{**common, **one, "SLURMDDP_MASTER_ADDR": "n1"} for one in of_ranks]


def of_nobody(run: str) -> Launch:
    return [{"SLURMDDP_LAUNCH_ID": run}]


def of_kubernetes(run: str) -> Launch:
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "job-0.net", "JOB_NAME": run}
    return [{**common, "JOB_COMPLETION_INDEX": str(rank)} for rank in range(3)]


LAUNCHES = {"slurm": of_slurm, "torchrun": of_torchrun, "mpi": of_mpirun, "single": of_nobody}
ALL = [
    *LAUNCHES.items(),
    ("support.own.environment.kubernetes", of_kubernetes),
    ("support.own.environment.Kubernetes", of_kubernetes),
]


def test_every_shipped_environment_has_a_launch_here() -> None:
    assert LAUNCHES.keys() == ENVIRONMENTS.keys()


@pytest.mark.parametrize(("name", "launch"), ALL, ids=[name for name, _ in ALL])
def test_d11_an_environment_gives_each_rank_of_a_launch_its_own_number(
    name: str, launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    infos = [detect({**environ, "SLURMDDP_ENVIRONMENT": name}) for environ in launch("one")]
    size = len(infos)
    assert sorted(info.rank for info in infos) == list(range(size))
    assert {info.world_size for info in infos} == {size}
    assert len({(info.node_rank, info.local_rank) for info in infos}) == size
    assert {info.node_rank for info in infos} == set(range(infos[0].nodes))
    [launch_id] = {info.launch_id for info in infos}
    [other] = {detect({**environ, "SLURMDDP_ENVIRONMENT": name}).launch_id for environ in launch("two")}
    assert launch_id != other, "ranks of two launches never meet"
    # It is pure: the mapping alone decides, and stays as it is.
    monkeypatch.setattr(os, "environ", {"RANK": "9", "SLURM_PROCID": "9", "JOB_COMPLETION_INDEX": "9"})
    given = [dict(environ) for environ in launch("one")]
    assert [detect(environ, name) for environ in given] == infos
    assert given == list(launch("one"))


@pytest.mark.parametrize(
    "name", ["slurm", "torchrun", "mpi", "support.own.environment.kubernetes", Kubernetes, Kubernetes()]
)
def test_d11_an_environment_that_lacks_its_variables_says_so(name) -> None:
    with pytest.raises(SlurmddpError, match=r"not set|missing"):
        detect({}, name)


def test_d11_an_unknown_environment_lists_the_alternatives() -> None:
    for given in ({"SLURMDDP_ENVIRONMENT": "kubernets"}, {}):
        with pytest.raises(ConfigError, match=r"'kubernets'.*Known: mpi, single, slurm, torchrun") as caught:
            detect(given, "kubernets")
        assert "package.module.Name" in caught.value.hint
    with pytest.raises(ConfigError, match=r"support\.own\.environment has no 'kubernete'.*kubernetes"):
        detect({}, "support.own.environment.kubernete")


INFO = {"environment": "x", "world_size": 2, "local_world_size": 2, "launch_id": "y"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda environ: None, "it must be a RankInfo"),
        (lambda environ: environ["NOWHERE"], "KeyError: 'NOWHERE'"),
        (lambda environ: RankInfo(**INFO, rank=2), "count from 0"),
        (lambda environ: RankInfo(**INFO, local_rank=2), "count from 0"),
        (lambda environ: RankInfo(**INFO, node_rank=1), "count from 0"),
        (lambda environ: RankInfo(**INFO, tasks=(1, 2)), "add up to world_size"),
        (lambda environ: RankInfo(**{**INFO, "launch_id": "single"}), "several ranks need a launch_id"),
        (3, "no method __call__"),
    ],
)
def test_d11_a_wrong_environment_of_ones_own_is_refused(given, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        detect({}, given)


def test_d11_an_environment_may_leave_other_cases_to_slurmddp() -> None:
    for given, environ in ((detect, {}), ("slurmddp.environments.detect.detect", {"RANK": "1"})):
        assert detect(environ, given).environment == "single"
    variable = {"SLURMDDP_ENVIRONMENT": "slurmddp.environments.detect.detect"}
    assert detect(variable).environment == "single"


def test_d11_ranks_that_slurmddp_has_started_keep_their_numbers() -> None:
    def elsewhere(environ: Mapping[str, str]) -> RankInfo:
        raise MismatchError("asked")

    launched = {"SLURMDDP_LAUNCHER": "local", "SLURMDDP_LAUNCH_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}
    assert detect(launched, elsewhere).rank == 1
    by_agent = {**of_slurm("x")[3], "SLURMDDP_RESTART_COUNT": "0", "SLURMDDP_ENVIRONMENT": ""}
    assert detect(by_agent, elsewhere).rank == 3
    with pytest.raises(MismatchError, match="asked"):
        detect(of_slurm("x")[3], elsewhere)
