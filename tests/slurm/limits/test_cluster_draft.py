"""Drafts of cluster files: what they hold, where it comes from, and that each fits its site."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import yaml

from slurmddp.settings.schema import Cluster
from slurmddp.slurm.command_output import parse_facts
from slurmddp.slurm.limits.cluster_draft import draft, file_name, usable
from slurmddp.slurm.limits.nodes import parse_groups, without_reserved
from slurmddp.slurm.limits.partitions import Partition
from slurmddp.slurm.limits.site import Site, check_cluster
from slurmddp.slurm.units import parse_minutes
from support import ROOT
from support.slurm.sites import CONFIG, site
from support.slurm.slurm_jobs import make_job


def drafted(partition: str, where: Site) -> tuple[str, Cluster]:
    text = draft(where.partitions[partition], where)
    return text, Cluster(**yaml.safe_load(text))


def test_only_partitions_that_take_jobs_are_drafted() -> None:
    assert [one.name for one in usable(site())] == ["gpu", "cpu"]


def test_a_draft_of_gpu_nodes_names_the_type_where_the_partition_has_several() -> None:
    text, cluster = drafted("gpu", site())
    expected = Cluster(
        name="gpu",
        partition="gpu",
        gpus_per_node=8,
        gpu_type="a100",
        gpu_request="gpus-per-node",
        max_nodes=4,
        cpus_per_node=128,
        mem_gb=1006.8,
        mem_request="mem",
        time_limit="1-00:00:00",
    )
    assert cluster == expected
    for fact in ("PreemptMode=REQUEUE, GraceTime=60", "16 for each GPU", "a100, ib", "also has v100"):
        assert fact in text
    assert "2 with gpu:v100:4, 96 CPUs, 500000 MB, idle" in text


def test_a_draft_names_the_gpus_without_a_type_that_the_partition_also_has() -> None:
    cluster = site()
    nodes = parse_groups("gpu|4|64|2:32:1|257000|gpu:a100:8|f|idle\ngpu|1|64|2:32:1|257000|gpu:2|f|idle\n")
    text, _ = drafted("gpu", replace(cluster, groups=nodes))
    assert "# the partition also has GPUs without a type (sinfo %G)" in text


def test_each_value_of_a_draft_says_where_it_comes_from() -> None:
    text, _ = drafted("gpu", site())
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.search(r"\S +# \S", line)] == []


def test_a_draft_of_cpu_nodes_keeps_the_limits_of_the_partition() -> None:
    text, cluster = drafted("cpu", site(CONFIG.replace("_MEMORY", "")))
    assert (cluster.gpus_per_node, cluster.ranks_per_node, cluster.cpus_per_node) == (0, 2, 60)
    assert (cluster.mem_request, cluster.mem_gb, cluster.max_nodes) == ("none", None, 20)
    assert "AllowAccounts=physics" in text and "Preemption: none" in text
    assert drafted("cpu", site())[1].mem_gb == 195.3


def test_where_the_quality_of_service_decides_preemption_no_grace_of_the_partition_is_told() -> None:
    text, _ = drafted("gpu", site(CONFIG.replace("preempt/partition_prio", "preempt/qos")))
    assert "Preemption: by quality of service" in text and "GraceTime=60" not in text


def test_gres_is_drafted_where_the_scheduler_knows_no_gpus_per_node() -> None:
    assert drafted("gpu", site(CONFIG.replace("cons_tres", "linear")))[1].gpu_request == "gres"


@pytest.mark.parametrize("select", ["cons_tres", "linear"])
@pytest.mark.parametrize("gres", ["gpu:a100:8", "gpu:4", "gpu:a100:4,gpu:v100:2", "(null)", "gpu:4090:2"])
def test_every_draft_fits_its_site(select: str, gres: str) -> None:
    where = Site(
        partitions={"on": Partition(name="on", is_default=True, max_time_min=90, total_nodes=3)},
        groups=parse_groups(f"on|2|32|1:32:1|64000|{gres}|f|idle\non|1|16|1:16:1|32000|gpu:2|g|idle\n"),
        config={"SelectType": f"select/{select}", "SelectTypeParameters": "CR_CPU_Memory"},
    )
    _, cluster = drafted("on", where)
    job = make_job(
        cluster,
        nodes=1,
        gpus_per_node=cluster.gpus_per_node,
        cpus_per_node=cluster.cpus_per_node,
        mem_gb=cluster.mem_gb,
        time_limit_min=parse_minutes(str(cluster.time_limit)),
    )
    assert cluster.partition == "on" and cluster.time_limit == "01:30:00"
    assert check_cluster(job, where) == []


@pytest.mark.parametrize(
    ("name", "file"), [("gpu", "gpu"), ("gpu.v2", "gpu.v2"), ("a/b c", "a-b-c"), ("../x", "x")]
)
def test_names_of_files_are_plain(name: str, file: str) -> None:
    assert file_name(Partition(name=name)) == file


def test_the_docs_show_a_draft_as_it_is() -> None:
    assert draft(site().partitions["gpu"], site()) in (ROOT / "docs/guides/cluster.md").read_text()


def test_a_draft_asks_for_what_the_system_leaves_of_a_node() -> None:
    here = site()
    (node,) = [parse_facts("CPUTot=128 CPUEfctv=124 RealMemory=1031000 MemSpecLimit=7000 Partitions=gpu")]
    text, cluster = drafted("gpu", replace(here, groups=without_reserved(here.groups, [node])))
    assert (cluster.cpus_per_node, cluster.mem_gb) == (124, 1000.0)
    assert "sinfo %c: 128; 4 for the system (CoreSpecCount)" in text
    assert "sinfo %m: 1031000 MB; 7000 MB for the system (MemSpecLimit)" in text


@pytest.mark.parametrize("gres", ["gpu:ampere:6,gpu:1g.10gb:28", "gpu:a100_1g.5gb:28,gpu:ampere:6"])
def test_a_draft_asks_for_whole_gpus_before_parts_of_them(gres: str) -> None:
    here = site()
    nodes = parse_groups(f"gpu|2|64|2:32:1|257000|{gres}|(null)|idle\n")
    _, cluster = drafted("gpu", replace(here, groups=nodes))
    assert (cluster.gpus_per_node, cluster.gpu_type) == (6, "ampere")
