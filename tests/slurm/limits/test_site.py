"""A job or a cluster file against a site: a finding names key, value, what the site has, and a remedy."""

from __future__ import annotations

import pytest

from slurmddp.slurm.limits.site import check, check_cluster
from support.slurm.sites import CONFIG, site
from support.slurm.slurm_jobs import make_job

A100 = {"nodes": 4, "gpus_per_node": 8, "ranks_per_node": 8, "cpus_per_node": 128, "mem_gb": 1000}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        A100,
        {**A100, "mem_gb": 0, "gpu_type": "a100", "gpu_request": "gres", "constraint": "a100&ib"},
        {"gpus_per_node": 4, "nodes": 4, "partition": "gpu,cpu"},
        {"partition": "cpu", "nodes": 10, "gpus_per_node": 8, "gpu_request": "none"},
        {"partition": "cpu", "mem_gb": 9999, "mem_request": "none"},
        {"partition": "gpu", "constraint": "[a100*2&v100*2]"},
        {"qos": "short", "account": "physics", "time_limit_min": 30, "nodes": 2, "gpus_per_node": 8},
    ],
)
def test_a_job_that_fits_has_no_findings(changes: dict[str, object]) -> None:
    assert check(make_job(**changes), site()) == []


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"partition": "gpus"}, "partition", ["'gpus'", "Did you mean gpu?"]),
        ({"nodes": 5}, "nodes", ["nodes=5", "at most 4 (MaxNodes)"]),
        ({**A100, "gpus_per_node": 9}, "gpus_per_node", ["gpus_per_node=9", "at most 8 GPUs"]),
        ({"partition": "cpu", "gpus_per_node": 1}, "gpus_per_node", ["no GPUs", "gpu_request: none"]),
        ({"gpus_per_node": 2, "gpu_type": "a10"}, "cluster.gpu_type", ["a100, v100", "Did you mean a100"]),
        ({"gpus_per_node": 5, "gpu_type": "v100"}, "gpus_per_node", ["at most 4 GPUs", "gpus_per_node=4"]),
        ({"gpus_per_node": 4, "gpu_type": "v100", "nodes": 3}, "nodes", ["has 2 nodes with", "nodes=2"]),
        ({"cpus_per_node": 129}, "cpus_per_node", ["at most 128 CPUs"]),
        ({"partition": "cpu", "cpus_per_node": 64}, "cpus_per_node", ["60 (MaxCPUsPerNode)"]),
        ({"mem_gb": 2000}, "mem_gb", ["mem_gb=2000", "1006.8 GiB", "mem_gb=1006.8"]),
        ({"partition": "cpu", "mem_gb": 200}, "mem_gb", ["195.3 GiB", "MaxMemPerNode"]),
        ({"constraint": "a100&ibb"}, "cluster.constraint", ["'ibb'", "Did you mean ib?"]),
        ({"constraint": "v100", "nodes": 3}, "nodes", ["has 2 nodes"]),
        ({"time_limit_min": 9999}, "time_limit", ["6-22:39:00", "2-00:00:00 (MaxTime)"]),
        ({"account": "physik"}, "account", ["accounts here are physics", "Did you mean physics"]),
        ({"qos": "shrt"}, "qos", ["normal, short, tight", "Did you mean short"]),
        ({"qos": "short", "time_limit_min": 60}, "time_limit", ["QOS 'short'", "00:30:00 (MaxWall)"]),
        ({"qos": "short", "nodes": 3}, "nodes", ["QOS 'short'", "at most 2 (MaxTRES node)"]),
        ({"qos": "short", "cpus_per_node": 128, "nodes": 3}, "nodes", ["at most 2"]),
        ({"account": "physics", "time_limit_min": 2000}, "time_limit", ["account 'physics'", "1-00:00:00"]),
        ({"partition": "cpu", "nodes": 11}, "nodes", ["QOS 'tight'", "at most 10"]),
    ],
)
def test_a_job_that_does_not_fit_is_told_why(changes: dict[str, object], key: str, words: list[str]) -> None:
    found = check(make_job(**changes), site())
    assert key in [one.key for one in found]
    text = " ".join(map(str, found))
    assert [word for word in words if word not in text] == []


def test_a_full_queue_is_told() -> None:
    job = make_job(partition="cpu", nodes=1)
    assert check(job, site(tight=2)) == []
    (full,) = check(job, site(tight=3))
    assert "QOS 'tight' limits your jobs in the queue to 3 (MaxSubmitJobs), and you have 3" in str(full)
    assert check(job, site(tight=1), jobs=2) == []
    (full,) = check(job, site(tight=1), jobs=3)
    assert "(MaxSubmitJobs), and you have 1, and the array has 3 more" in str(full)


def test_a_job_in_the_queue_does_not_count_against_itself() -> None:
    assert check(make_job(partition="cpu", nodes=1), site(tight=3).with_empty_queue()) == []


def test_limits_that_a_site_does_not_enforce_are_not_compared() -> None:
    lax = site(CONFIG.replace("associations,limits,qos,safe", "none"), tight=9)
    assert check(make_job(partition="cpu", nodes=11, account="physik", qos="shrt"), lax) == []


def test_a_site_without_cons_tres_wants_gres() -> None:
    linear = site(CONFIG.replace("cons_tres", "linear"))
    (found,) = check(make_job(gpus_per_node=2), linear)
    assert (found.key, "gpu_request: gres" in found.remedy) == ("cluster.gpu_request", True)
    assert check(make_job(gpus_per_node=2, gpu_request="gres"), linear) == []


def test_a_cluster_file_is_checked_at_its_largest_size() -> None:
    (found,) = check_cluster(make_job(max_nodes=5, nodes=1), site())
    assert (found.key, found.value) == ("max_nodes", "5")
    assert check_cluster(make_job(max_nodes=4, nodes=1), site()) == []
