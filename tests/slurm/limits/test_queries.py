"""Queries about a site: its commands and their many ways to answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurmddp.errors import SlurmError
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.limits.queries import cluster_name, describe, max_array_size
from support.slurm import sites
from support.slurm.slurm_jobs import FakePrograms


@pytest.fixture
def slurm(programs: FakePrograms) -> SlurmClient:
    return SlurmClient()


def test_the_cluster_is_named_by_slurms_configuration(programs: FakePrograms, slurm: SlurmClient) -> None:
    programs.write("config", "ClusterName             = alpha\n")
    assert cluster_name(slurm) == "alpha"
    programs.write("config", "Configuration data\n")
    with pytest.raises(SlurmError, match="names no cluster"):
        cluster_name(slurm)


def test_a_site_may_have_no_arrays_or_not_say(programs: FakePrograms, slurm: SlurmClient) -> None:
    assert max_array_size(slurm) == 0, "scontrol show config is refused"
    programs.write("config", "MaxArraySize            = 1001\n")
    assert max_array_size(slurm) == 1001
    programs.write("silence", "slurm_load_ctl_conf error: Unable to contact slurm controller\n")
    with pytest.raises(SlurmError, match="Unable to contact"):
        max_array_size(slurm)


def write_site(programs: FakePrograms) -> None:
    for name, text in {
        "partitions": sites.PARTITIONS,
        "nodes-of-partitions": sites.NODES,
        "config": sites.CONFIG,
        "qos": sites.QOS,
        "associations": sites.ASSOCIATIONS,
        "accounts": sites.ACCOUNTS,
        "default-account": "physics",
        "account-and-qos": "physics|tight",
    }.items():
        programs.write(name, text)


def test_a_site_is_described_by_partitions_nodes_settings_and_accounting(
    programs: FakePrograms, slurm: SlurmClient, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SINFO_FORMAT", "%A")
    write_site(programs)
    slurm.submit(script, token="t:1")
    assert describe(slurm) == sites.site(tight=1)


def test_without_accounting_only_its_limits_are_not_known(
    programs: FakePrograms, capsys: pytest.CaptureFixture[str]
) -> None:
    write_site(programs)
    (programs.folder / "qos").unlink()
    assert describe(SlurmClient()).accounting is None
    assert "So jobs are not compared with limits of accounts and QOS." in capsys.readouterr().err
    programs.write("config", sites.CONFIG.replace("accounting_storage/slurmdbd", "(null)"))
    assert describe(SlurmClient()).accounting is None
    assert capsys.readouterr().err == ""


def test_what_a_site_shows_to_its_staff_only_is_left_out(
    programs: FakePrograms,
) -> None:
    said: list[str] = []
    slurm = SlurmClient(report=said.append)
    write_site(programs)
    programs.write("deny-nodes", "")
    assert describe(slurm) == replace(sites.site(), groups=())
    assert said == [
        "sinfo failed: slurm_load_node: Access/permission denied. So jobs are not compared with the nodes of "
        "this site."
    ]
    programs.write("deny-partitions", "")
    assert describe(slurm) == replace(sites.site(), groups=(), partitions={})
    programs.write("silence", "slurm_load_partitions: Unable to contact slurm controller (connect failure)\n")
    with pytest.raises(SlurmError, match="Unable to contact"):
        describe(slurm)
