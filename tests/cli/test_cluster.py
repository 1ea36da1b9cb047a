"""`slurmddp cluster` and `--check`, with a site of fake programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slurmddp.cli.main import main
from slurmddp.control import check
from slurmddp.control.check import CheckedClusters, check_clusters
from slurmddp.control.json_encoding import from_json
from slurmddp.errors import EXIT_CONFIG, EXIT_SLURM
from slurmddp.runs.folder.excluded_nodes import exclude, share, shared_file
from slurmddp.runs.folder.file_system import FileSystem, HostView, shortfalls
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.slurm import client
from support.slurm import sites
from support.slurm.slurm_jobs import FakePrograms

START = "sbatch: Job 7 to start at 2026-11-25T07:49:25 using 8 processors on nodes n[1-2] in partition gpu"
TOO_MANY = (
    'for script; do :; done; if grep -qE -e "--nodes=(5|9|16)$" "$script"; then echo "allocation failure: '
    'Requested node configuration is not available" >&2; exit 1; fi\n'
)
"""What sbatch says of more nodes than the partition gives."""
DELAY = "A requeued job waits 120 s at least (SLURM's default)."


@pytest.fixture
def site(programs: FakePrograms, project: Path) -> FakePrograms:
    for name, text in {
        "partitions": sites.PARTITIONS,
        "nodes-of-partitions": sites.NODES,
        "config": sites.CONFIG.replace("accounting_storage/slurmdbd", "(null)"),
        "test-only": f'{TOO_MANY}echo "{START}" >&2',
    }.items():
        programs.write(name, text)
    return programs


def test_detect_prints_drafts_and_writes_nothing(site, project, capsys):
    assert main(["cluster", "detect"]) == 0
    out, err = capsys.readouterr()
    assert "# conf/cluster/gpu.yaml\n# yaml-language-server: " in out and "\n# Partition gpu of alpha" in out
    assert "# conf/cluster/cpu.yaml\n" in out
    assert "nothing was written" in err and not (project / "conf/cluster/gpu.yaml").exists()


def test_detect_writes_files_that_check_accepts_and_changes_none(site, project, capsys):
    kept = project / "conf/cluster/cpu.yaml"
    kept.write_text("name: cpu\npartition: cpu\n")
    assert main(["cluster", "detect", "--write"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "wrote   conf/cluster/gpu.yaml",
        "kept    conf/cluster/cpu.yaml (exists; not changed)",
        "wrote   conf/.schema (for editors)",
    ]
    assert kept.read_text() == "name: cpu\npartition: cpu\n"
    assert main(["cluster", "check", "gpu", "cpu"]) == 0
    assert capsys.readouterr().out == f"gpu: fits this site\ncpu: fits this site\n{DELAY}\n"


def test_detect_names_a_near_partition(site, capsys):
    assert main(["cluster", "detect", "gpuu", "--write"]) == EXIT_CONFIG
    assert "no partition 'gpuu' that takes your jobs. Did you mean gpu?" in capsys.readouterr().err


def test_detect_says_when_nothing_can_be_used(site, capsys):
    site.write("nodes-of-partitions", "")
    assert main(["cluster", "detect"]) == EXIT_SLURM
    assert "no partition that has nodes and takes your jobs" in capsys.readouterr().err


def test_check_of_all_files_names_key_value_site_and_remedy(site, project, capsys):
    (project / "conf/cluster/far.yaml").write_text("partition: gpu\nmax_nodes: 9\ntime_limit: 90\n")
    assert main(["cluster", "check"]) == EXIT_CONFIG
    out = capsys.readouterr().out
    assert "far: 1 finding\n  max_nodes=9: partition 'gpu' gives a job at most 4 (MaxNodes). Use max_n" in out
    assert "small: fits this site" in out and "big: 1 finding\n  max_nodes=16" in out
    assert main(["cluster", "check", "far", "--json"]) == EXIT_CONFIG
    result = from_json(CheckedClusters, json.loads(capsys.readouterr().out))
    assert result == check_clusters(project, ["far"])
    (finding,) = result.clusters["far"]
    assert (finding.key, finding.value) == ("max_nodes", "9")


def test_check_names_the_nodes_that_new_runs_avoid_and_how_to_end_that(site, project, tmp_path, capsys):
    first = RunFolder(tmp_path)
    exclude(first, "n7", "srun reported its failure", hours=1)
    share(first, "alpha", since=0)
    assert main(["cluster", "check", "small"]) == 0
    out = capsys.readouterr().out
    assert f"delete its line in {shared_file()}:\n  n7 until " in out
    assert f": srun reported its failure (run {first.name})\n" in out
    shared_file().unlink()
    assert main(["cluster", "check", "small"]) == 0
    assert capsys.readouterr().out == f"small: fits this site\n{DELAY}\n"


def test_check_and_detect_name_the_rules_of_the_site_on_requeues_and_private_folders(site, project, capsys):
    newer = "SchedulerParameters     = bf_interval=1,requeue_delay=7\nNamespaceType = namespace/tmpfs\n"
    site.write("config", sites.CONFIG.replace("accounting_storage/slurmdbd", "(null)") + newer)
    rules = [
        "A requeued job waits 7 s at least (SchedulerParameters=requeue_delay).",
        "Each job has a /tmp and a /dev/shm of its own (NamespaceType=namespace/tmpfs), so ",
    ]
    assert main(["cluster", "check", "small"]) == 0
    fits, *shown = capsys.readouterr().out.splitlines()
    assert fits == "small: fits this site"
    assert [line[: len(rule)] for line, rule in zip(shown, rules, strict=True)] == rules
    assert main(["cluster", "check", "small", "--json"]) == 0
    assert from_json(CheckedClusters, json.loads(capsys.readouterr().out)).rules == tuple(shown)
    assert main(["cluster", "detect", "gpu"]) == 0
    assert "".join(f"# {line}\n" for line in shown) in capsys.readouterr().out


LATE = HostView(
    host="n2",
    kind="fuse.sshfs",
    seen_s={"name": None, "open": None, "listing": 61.02, "grown": 0.04, "replaced": 0.0, "removed": 0.3},
)
FILES = FileSystem(
    folder=Path("/shared/runs"),
    hosts=(replace(LATE, host="login1", kind="", seen_s=dict.fromkeys(LATE.seen_s, 0.01)), LATE),
    limit_s=70,
    reads=40,
    broken_reads=3,
    lines=200,
    lost_lines=0,
    broken_lines=0,
    lost_plain_lines=12,
    doubly_created=0,
    flock="one host",
    fcntl="unsupported",
    hard_links=False,
    synced_folders=True,
)
SHOWN = """\
small: fits this site

/shared/runs, seconds until a change of another host is seen:
                               login1          n2
type of the mount           not known  fuse.sshfs
a new file, by name             0.0 s      > 70 s
a new file, by open             0.0 s      > 70 s
a new file, by listing          0.0 s      61.0 s
a grown file                    0.0 s       0.0 s
a replaced file                 0.0 s       0.0 s
a removed file, by listing      0.0 s       0.3 s

rename                     3 of 40 reads of a replaced file found no file or a part
append as slurmddp does    0 of 200 lines lost, 0 broken
append without a lock      12 lines lost
new names (O_EXCL, mkdir)  0 created by several hosts
locks (flock; fcntl)       hold on one host only; not supported
hard links                 no: slurmddp copies or renames instead
fsync of a folder          yes
"""


def test_check_shows_the_measured_file_system_and_what_it_lacks(site, project, monkeypatch, capsys):
    asked = []

    def measure(job, folder, nodes, slurm, *, start_s):
        asked.append((job.cluster.name, folder, nodes))
        return FILES

    monkeypatch.setattr(check, "measure_on_nodes", measure)
    assert main(["cluster", "check", "small", "--files"]) == EXIT_CONFIG
    out = capsys.readouterr().out
    assert out.startswith(SHOWN)
    fault, late, lock = out.removeprefix(SHOWN).strip().split("\n\n")
    assert fault.startswith("fault: 3 of 40 reads")
    assert late.startswith("warning: Changes of another host are seen only after 61 s on n2.")
    assert lock.startswith("warning: A lock (flock) of one host does not keep")
    assert asked == [("small", project, 2)]
    (project / "runs").mkdir()
    assert main(["cluster", "check", "small", "--files", "--json"]) == EXIT_CONFIG
    result = from_json(CheckedClusters, json.loads(capsys.readouterr().out))
    assert result.files["small"] == replace(FILES, shortfalls=shortfalls(FILES))
    assert asked[1] == ("small", project / "runs", 2)


def test_warnings_about_files_are_no_reason_for_an_exit_code(site, project, monkeypatch, capsys):
    monkeypatch.setattr(
        check, "measure_on_nodes", lambda *arguments, **options: replace(FILES, broken_reads=0)
    )
    assert main(["cluster", "check", "small", "--files"]) == 0
    assert "fault: " not in capsys.readouterr().out


def test_the_files_of_a_partition_of_one_node_are_measured_on_one(site, project, monkeypatch, capsys):
    (project / "conf/cluster/single.yaml").write_text("partition: old\ntime_limit: 30\n")
    asked = []
    monkeypatch.setattr(
        check, "measure_on_nodes", lambda job, folder, nodes, *rest, **options: asked.append(nodes) or FILES
    )
    main(["cluster", "check", "single", "--files"])
    assert asked == [1], capsys.readouterr().out


def test_check_shows_the_refusal_of_sbatch(site, project, capsys):
    site.write("test-only", 'echo "allocation failure: Invalid license specification" >&2; exit 1')
    assert main(["cluster", "check", "small"]) == EXIT_CONFIG
    assert "cluster=small: sbatch failed: allocation failure: Invalid license" in capsys.readouterr().out


def test_check_without_a_file_says_how_to_get_one(site, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["cluster", "check"]) == EXIT_CONFIG
    assert "`slurmddp cluster detect --write`" in capsys.readouterr().err


def test_a_checked_job_is_neither_queued_nor_written(site, project, capsys):
    assert main(["train", "+cluster=small", "name=first", "--check"]) == 0
    out = capsys.readouterr().out
    assert "This SLURM would start first-" in out
    assert "at 2026-11-25 07:49:25 with 8 processors on nodes n[1-2]. Nothing was queued or written." in out
    assert site.calls("sbatch") == 0 and not (project / "runs").exists()


def test_a_job_with_more_nodes_than_its_nodelist_is_noted_and_not_refused(site, project, capsys):
    """SLURM adds nodes of its choice, but `sbatch --test-only` refuses the job."""
    site.write(
        "test-only",
        'for script; do :; done; if grep -q -e "--nodes=2" "$script"; then echo "allocation failure: '
        f'Requested node configuration is not available" >&2; exit 1; fi; echo "{START}" >&2',
    )
    asked = ["+cluster=small", "nodes=2", "+cluster.sbatch.nodelist=n1", "--check"]
    assert main(["train", *asked]) == 0
    shown, told = capsys.readouterr()
    assert "This SLURM would start" in shown and "2026-11-25" not in shown
    assert "nodelist=n1 names 1 of the job's 2 nodes; SLURM chooses the others. Use nodes=1" in told
    asked[2] = "+cluster.sbatch.nodelist='n[1-2]'"
    assert main(["train", *asked]) == EXIT_CONFIG, "a refusal of a job whose list is long enough counts"
    shown, told = capsys.readouterr()
    assert "Requested node configuration is not available" in shown and "names" not in told


def test_a_checked_job_for_a_partition_that_is_down_waits_for_it(site, project, capsys):
    asked = ["+cluster=small", "partition=old", "nodes=1", "cpus_per_node=8", "time_limit=30"]
    assert main(["train", *asked, "--check"]) == 0
    assert ", once the site has partition 'old' up again (DOWN now)." in capsys.readouterr().out


def test_a_checked_job_for_nodes_that_are_drained_waits_for_them(site, project, capsys):
    """sbatch queues the job, though `sbatch --test-only` refuses it."""
    words = "allocation failure: Requested node configuration is not available"
    site.write("test-only", f'echo "{words}" >&2; exit 1')
    drained = (
        "gpu|3|128|2:32:2|1031000|gpu:a100:8|a100|drained*\ngpu|1|128|2:32:2|1031000|gpu:a100:8|a100|idle\n"
    )
    site.write("nodes-of-partitions", drained)
    assert main(["train", "+cluster=small", "nodes=2", "--check"]) == 0
    waits = ", once enough nodes of partition 'gpu' are up (3 down or drained now, see `sinfo -R`)."
    assert waits in capsys.readouterr().out
    assert main(["cluster", "check", "small"]) == EXIT_CONFIG, "one node is up, so the refusal counts"
    assert words in capsys.readouterr().out
    site.write("nodes-of-partitions", drained.replace("idle", "down*"))
    assert main(["cluster", "check", "small"]) == 0


def test_a_checked_job_names_every_limit(site, project, capsys):
    asked = ["+cluster=small", "time_limit=9-0", "nodes=5", "--check", "gpu.py", "--lr", "1"]
    (project / "gpu.py").write_text("")
    assert main(["run", *asked]) == EXIT_CONFIG
    out = capsys.readouterr().out
    assert "nodes=5: partition 'gpu' gives a job at most 4 (MaxNodes)" in out
    assert "time_limit=9-00:00:00: partition 'gpu' allows at most 2-00:00:00 (MaxTime)" in out
    assert site.calls("sbatch") == 0


def test_where_sbatch_alone_refuses_a_job_a_note_still_names_the_limit(site, project, capsys):
    site.write(
        "config", sites.CONFIG.replace("accounting_storage/slurmdbd", "(null)") + "JobSubmitPlugins = lua\n"
    )
    site.write("test-only", 'echo "allocation failure: Requested time limit is invalid" >&2; exit 1')
    (project / "gpu.py").write_text("")
    assert main(["run", "+cluster=small", "time_limit=9-0", "--check", "gpu.py"]) == EXIT_CONFIG
    out = capsys.readouterr().out
    assert "Requested time limit is invalid" in out
    assert "note: This SLURM may never start the job: time_limit=9-00:00:00: partition 'gpu' allows" in out


def test_a_resumed_job_is_checked_with_its_changes(site, project, cluster_run, capsys):
    assert main(["resume", cluster_run, "time_limit=9-0", "--check"]) == EXIT_CONFIG
    assert "2-00:00:00 (MaxTime)" in capsys.readouterr().out


def test_the_points_of_a_sweep_are_checked_as_the_arrays_that_they_would_be(
    site, project, capsys, monkeypatch
):
    monkeypatch.setattr(client, "on_path", lambda: True)
    words = ["train", "+cluster=small", "name=first", "-m", "seed=1,2,3"]
    asks = (
        TOO_MANY + 'for file; do :; done; grep -o -- "--array=.*" "$file" >>tested || echo alone >>tested\n'
    )
    site.write("test-only", asks)
    site.write("config", site.read("config") + "MaxArraySize = 1001\n")
    assert main([*words, "nodes=1,9", "--check"]) == EXIT_CONFIG
    out = capsys.readouterr().out
    assert "This SLURM would start the array of 3 runs from first-" in out
    assert out.count("nodes=9: partition") == 1 and "would not start the array of 3 runs" in out
    assert site.read("tested") == "--array=0-2\n" and not (project / "runs").exists()
    assert main(words) == 0
    sweep = next((project / "runs").glob("*.sweep")).stem
    for folder in map(RunFolder, (project / "runs").glob("first-????????????")):
        folder.add_event("started", attempt=0, job_id=f"1_{folder.config()['seed']}", nodes="n1")
        folder.add_event(
            "ended", attempt=0, job_id=f"1_{folder.config()['seed']}", outcome="failed", next="none"
        )
    capsys.readouterr()
    assert main(["resume", sweep, "time_limit=1h", "--check"]) == 0
    out = capsys.readouterr().out
    assert "(3 of 3 runs to resume)" in out and out.count("would start the array of 3 runs") == 1
    assert site.read("tested") == "--array=0-2\n" * 2
    assert main(["resume", sweep, "time_limit=9-0", "--check"]) == EXIT_CONFIG
    assert capsys.readouterr().out.count("2-00:00:00 (MaxTime)") == 1 and site.calls("sbatch") == 1


def test_an_unanswered_check_is_no_refusal(site, project, capsys):
    site.write("test-only", 'echo "Unable to contact slurm controller (connect failure)" >&2; exit 1')
    assert main(["train", "+cluster=small", "--check"]) == EXIT_SLURM
    assert "scontrol ping" in capsys.readouterr().err


def test_a_local_run_can_not_be_checked(project, capsys):
    assert main(["train", "--check"]) == EXIT_CONFIG
    assert "+cluster=NAME" in capsys.readouterr().err


@pytest.fixture
def cluster_run(site, project, monkeypatch) -> str:
    """Submit a run to the fake programs and return its name."""
    monkeypatch.setattr(client, "on_path", lambda: True)
    assert main(["train", "+cluster=small", "name=first"]) == 0
    return next((project / "runs").iterdir()).name
