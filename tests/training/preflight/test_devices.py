"""The next attempt avoids a node with broken GPUs, also if its ranks find them before the preflight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import EXIT_FAILED, UnhealthyNodeError
from slurmddp.runs.folder.excluded_nodes import excluded_nodes
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.training.preflight import preflight
from slurmddp.training.preflight.checks import NOBODY, NODE, CheckContext, device
from slurmddp.training.process_group.device_agreement import DevicesError
from support.distributed import device_jobs, worker_jobs
from support.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed]

INFO = RankInfo(
    environment="slurm",
    world_size=6,
    local_world_size=2,
    nodes=3,
    hosts=("n1", "n2", "n3"),
    launch_id="1.0.0",
    gpus_on_node=2,
)
GONE = "Rank 2 on n2: 2 ranks on this node see 1 GPU(s)."


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("SLURMDDP_ATTEMPT", "0")
    folder = RunFolder(tmp_path / "run")
    folder.log_dir(0).mkdir(parents=True)
    return folder


@pytest.mark.parametrize("rank", [0, 2])
def test_the_node_is_excluded_once_and_all_ranks_exit_with_76(run: RunFolder, rank: int) -> None:
    with pytest.raises(UnhealthyNodeError) as caught:
        error = DevicesError(GONE, hint="Look at it.", nodes=[1])
        preflight.exclude_conflicting_nodes(replace(INFO, rank=rank), run, {}, error)
    assert GONE in caught.value.message
    assert caught.value.hint == "The next attempt runs on other nodes than n2."
    assert excluded_nodes(run) == (["n2"] if rank == 0 else [])


@pytest.mark.parametrize(
    ("nodes", "config", "unfit"),
    [([], {}, []), ([0, 1], {}, []), ([1], {"policy": {"exclude_failed_h": 0}}, ["1"])],
    ids=["the job's own fault", "most nodes", "no exclusion"],
)
def test_without_healthier_nodes_the_devices_error_stands(
    run: RunFolder, nodes: list[int], config: dict[str, Any], unfit: list[str]
) -> None:
    preflight.exclude_conflicting_nodes(INFO, run, config, DevicesError(GONE, hint="", nodes=nodes))
    assert excluded_nodes(run) == []
    told = run.events() if run.attempts_file.exists() else []
    assert [list(event.get("unfit", {})) for event in told] == ([unfit] if nodes else []), (
        "whose place a spare may take"
    )


@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize(
    ("asked", "told", "blamed"), [(True, "1", [(0,)]), (False, "1", []), (True, "0", [])]
)
def test_rank_main_excludes_the_node_if_the_preflight_is_on(
    run: RunFolder, asked: bool, told: str, blamed: list[tuple[int, ...]]
) -> None:
    worker_jobs.write_config(run, preflight=asked)
    place = {"SLURMDDP_PREFLIGHT": told}
    (answer,) = run_ranks(device_jobs.work_on_an_unfit_node, 1, str(run.path), environments=[place])
    assert answer == (EXIT_FAILED, blamed)


@pytest.mark.parametrize(
    ("built_with", "info", "visible", "blames"),
    [
        ("12.8", INFO, "0,1", NODE),
        (None, INFO, "0,1", NOBODY),
        ("12.8", INFO, "", None),
        ("12.8", replace(INFO, gpus_on_node=None), "0,1", None),
        ("12.8", replace(INFO, rank=1, local_rank=1), "0,1", None),
    ],
)
def test_gpus_that_torch_does_not_show_are_a_finding(
    run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    built_with: str | None,
    info: RankInfo,
    visible: str,
    blames: str | None,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_with)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = list(device(CheckContext(info=info, device=torch.device("cpu"), node="n1", folder=run)))
    assert [one.fault for one in found] == ([blames] if blames else [])
    assert all("SLURM has given 2 GPU(s), and torch shows none" in one.text for one in found)


@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize(("granted", "warned"), [("2", 1), ("", 0)])
def test_without_a_preflight_computing_on_cpus_is_warned_of(
    run: RunFolder, granted: str, warned: int
) -> None:
    worker_jobs.write_config(run)
    place = {"SLURM_GPUS_ON_NODE": granted, "CUDA_VISIBLE_DEVICES": ""}
    ((code, _),) = run_ranks(worker_jobs.work, 1, str(run.path), environments=[place])
    assert code == 0
    told = run.events() if run.attempts_file.exists() else []
    assert [event["event"] for event in told] == ["warned"] * warned
