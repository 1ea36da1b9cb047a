"""A job or a cluster file against a site: a finding names key, value, what the site has, and a remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurmddp.slurm.command_output import parse_facts
from slurmddp.slurm.limits import accounting
from slurmddp.slurm.limits.accounting import parse_associations, parse_qualities
from slurmddp.slurm.limits.nodes import parse_groups, without_reserved
from slurmddp.slurm.limits.site import at_largest_size, check, check_cluster, may_lift
from support.slurm.sites import CONFIG, NODES, site
from support.slurm.slurm_jobs import make_job

OWN = "physics||normal,short,long,wide|normal||||\n"
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
        (
            {"qos": "wide", "nodes": 10},
            "nodes",
            ["QOS 'wide' gives all its jobs", "9 together (GrpTRES node)"],
        ),
        ({"account": "physics", "time_limit_min": 2000}, "time_limit", ["account 'physics'", "1-00:00:00"]),
        ({"partition": "cpu", "nodes": 11}, "nodes", ["QOS 'tight'", "at most 10"]),
    ],
)
def test_a_job_that_does_not_fit_is_told_why(changes: dict[str, object], key: str, words: list[str]) -> None:
    found = check(make_job(**changes), site())
    assert key in [one.key for one in found]
    text = " ".join(map(str, found))
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("changes", "associations", "limit"),
    [
        ({"nodes": 5}, OWN, "MaxNodes"),
        ({"nodes": 5, "qos": "long"}, OWN, "MaxNodes"),
        ({"nodes": 5, "qos": "Wide"}, OWN, ""),
        ({"nodes": 7, "qos": "wide"}, OWN, "TotalNodes"),
        ({"time_limit_min": 9999}, OWN, "MaxTime"),
        ({"time_limit_min": 9999, "qos": "long"}, OWN, ""),
        ({"time_limit_min": 9999}, "physics||normal,long|long||||\n", ""),
        ({"time_limit_min": 9999}, "physics||long|||||\n", ""),
        ({"time_limit_min": 9999, "account": "PHYSICS"}, "physics||long|||||\n", ""),
        ({"time_limit_min": 9999}, "physics||normal,short|||||\n", "MaxTime"),
    ],
)
def test_limits_that_the_qos_of_a_job_lifts_are_not_compared(
    changes: dict[str, object], associations: str, limit: str
) -> None:
    here = site()
    assert here.accounting is not None
    own = replace(here.accounting, associations=parse_associations(associations))
    job, known = make_job(**changes), replace(here, accounting=own)
    found = check(job, known)
    assert [limit in str(finding) for finding in found] == ([True] if limit else [])
    assert not any(may_lift(job, known, finding) for finding in found)


@pytest.mark.parametrize(
    ("changes", "limit"), [({"nodes": 5}, "MaxNodes"), ({"time_limit_min": 9999}, "MaxTime")]
)
@pytest.mark.parametrize("answers", [False, True])
def test_limits_are_in_doubt_where_the_qos_of_a_job_is_not_known(
    changes: dict[str, object], limit: str, answers: bool
) -> None:
    here = site()
    assert here.accounting is not None
    several = replace(here.accounting, associations=parse_associations("physics||normal,long,wide|||||\n"))
    known = replace(here, accounting=several if answers else None)
    job = make_job(**changes)
    (found,) = check(job, known)
    assert limit in str(found) and may_lift(job, known, found)


@pytest.mark.parametrize(
    "changes",
    [
        {"account": "Physics", "qos": "Short", "nodes": 2, "time_limit_min": 30},
        {"constraint": "[A100_SXM:80GB*2&2080ti*2]"},
        {"constraint": "2080ti|GPU_MEM:80GB"},
        {"constraint": "!rack9&ib"},
    ],
)
def test_names_are_compared_as_slurm_does(changes: dict[str, object]) -> None:
    named = NODES.replace("v100|idle", "2080ti,GPU_MEM:80GB,A100_SXM:80GB|idle")
    here = replace(site(), groups=parse_groups(named))
    assert check(make_job(**{"nodes": 2, **changes}), here) == []


def test_limits_hold_in_the_case_of_letters_that_the_site_writes() -> None:
    (wall,) = check(make_job(qos="SHORT", time_limit_min=60), site())
    assert "QOS 'short' allows at most 00:30:00 (MaxWall)" in str(wall)


@pytest.mark.parametrize(
    ("account", "default", "limit"),
    [(None, "root", ""), (None, "aaa", "QOS 'short'"), (None, "", ""), ("AAA", "root", "QOS 'short'")],
)
def test_a_job_without_an_account_runs_in_the_default_one(
    account: str | None, default: str, limit: str
) -> None:
    both = parse_associations("aaa||short|short||||\nroot||normal|normal||||\n")
    here = site()
    assert here.accounting is not None
    known = replace(here, accounting=replace(here.accounting, associations=both, default_account=default))
    found = check(make_job(partition="gpu", time_limit_min=60, account=account), known)
    assert [limit in str(one) for one in found] == ([True] if limit else [])


@pytest.mark.parametrize(
    ("partition", "flags", "minutes", "limit"),
    [
        ("", "", 45, "QOS 'short'"),
        ("free", "", 45, ""),
        ("free", "OverPartQOS", 45, "QOS 'short'"),
        ("free", "", 90, "QOS 'free'"),
    ],
)
def test_of_several_limits_the_first_in_the_order_of_slurm_counts(
    partition: str, flags: str, minutes: int, limit: str
) -> None:
    here = site()
    assert here.accounting is not None
    qualities = parse_qualities(f"short|00:30:00||||{flags}\nfree|01:00:00||||\n")
    own = parse_associations("physics||short|short|00:01:00|||\n")
    known = replace(here.accounting, qualities=qualities, associations=own, default_account="physics")
    job = make_job(account="physics", qos="short", time_limit_min=minutes)
    found = accounting.check(job, known, [partition] if partition else [])
    assert [limit in str(one) for one in found] == ([True] if limit else [])


@pytest.mark.parametrize(
    ("changes", "config", "lifts"),
    [
        ({}, "", False),
        ({"qos": "short"}, "", False),
        ({"qos": "wide"}, "", False),
        ({"reservation": "maintenance"}, "", True),
        ({"sbatch": {"time_min": 10}}, "", True),
        ({}, "JobSubmitPlugins = lua\n", True),
        ({}, "JobSubmitPlugins = (null)\n", False),
    ],
)
def test_a_time_limit_is_no_reason_where_the_site_may_lift_it(
    changes: dict[str, object], config: str, lifts: bool
) -> None:
    here, job = site(CONFIG + config), make_job(time_limit_min=9999, **changes)
    found = [one for one in check(job, here) if one.limit == "MaxTime"]
    assert [may_lift(job, here, one) for one in found] == [lifts]


def test_nodes_that_keep_something_for_the_system_give_jobs_the_rest() -> None:
    facts = parse_facts(
        "NodeName=n1 CPUEfctv=3 CPUTot=4 RealMemory=24105 CoreSpecCount=1 MemSpecLimit=2048 "
        "Partitions=low,high"
    )
    low, other = parse_groups(
        "low|2|4|4:1:1|24105|(null)|(null)|idle\nbig|1|8|8:1:1|9000|(null)|(null)|idle\n"
    )
    kept, same = without_reserved([low, other], [facts])
    assert (kept.cpus, kept.memory_mb, kept.reserved_cpus, kept.reserved_mb) == (3, 22057, 1, 2048)
    assert same == other


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


SEGMENTS_OF_2 = {"segment": 2}


@pytest.mark.parametrize(
    ("nodes", "spare", "found"),
    [
        (1, 0, ""),  # smaller than a segment: SLURM ignores it
        (4, 0, ""),
        (3, 1, ""),
        (2, 1, "spare_nodes=1: segment=2 does not divide the 3 nodes of the job. "
               "Use spare_nodes=2 for 4 nodes in all, or spare_nodes=0 for 2."),
        (3, 0, "nodes=3: segment=2 does not divide the 3 nodes of the job. "
               "Use spare_nodes=1 for 4 nodes in all, or nodes=2 for 2."),
    ],
)  # fmt: skip
def test_nodes_and_spare_nodes_fill_segments(nodes: int, spare: int, found: str) -> None:
    job = make_job(nodes=nodes, spare_nodes=spare, partition="cpu", sbatch=SEGMENTS_OF_2)
    assert " ".join(map(str, check(job, site()))) == found


def test_the_largest_job_of_a_cluster_file_fills_segments() -> None:
    job = make_job(partition="cpu", max_nodes=5, sbatch=SEGMENTS_OF_2)
    assert at_largest_size(job).resources.nodes == 4
    assert check_cluster(job, site()) == []
