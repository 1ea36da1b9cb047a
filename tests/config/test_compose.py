"""From the command line to a Job: search order, defaults, sizes, run names, later changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slurmddp.cli.main import main
from slurmddp.config.compose import compose, unread
from slurmddp.config.identity import fingerprint
from slurmddp.config.job import build_job
from slurmddp.config.overrides import options
from slurmddp.config.resume import free_keys, job_of_run
from slurmddp.config.schema import TOP, Cluster, keys
from slurmddp.errors import ConfigError
from slurmddp.runs.folder import config_secrets, create
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.spec import GlobalBatch, Job, Resources
from support import ROOT
from support.runs.projects import make_project

CONF = ROOT / "slurmddp" / "conf"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path / "project")


def job_of(project: Path, *overrides: str, gpus_here: int = 0) -> Job:
    composed = compose(overrides, project)
    return build_job(composed, project_dir=project, overrides=overrides, gpus_here=gpus_here)


def test_a_laptop_gets_two_ranks(project: Path) -> None:
    job = job_of(project)
    assert job.resources == Resources(nodes=1, ranks_per_node=2)
    assert (job.launcher, job.cluster.name, job.name) == ("local", "local", "gpt")
    assert job.run_dir == project / "runs" / job.run_name
    assert job.run_name.startswith("gpt-") and len(job.run_name) == len("gpt-") + 8


def test_a_machine_with_gpus_gets_one_rank_for_each(project: Path) -> None:
    assert job_of(project, gpus_here=4).resources == Resources(nodes=1, ranks_per_node=4, gpus_per_node=4)
    assert job_of(project, "ranks_per_node=1", gpus_here=4).resources.gpus_per_node == 1
    assert job_of(project, "gpus_per_node=0", gpus_here=4).resources.ranks_per_node == 2


def test_a_cluster_says_what_the_command_line_leaves_open(project: Path) -> None:
    job = job_of(project, "+cluster=big", "nodes=3")
    assert job.launcher == "slurm"
    assert job.resources == Resources(
        nodes=3, ranks_per_node=8, gpus_per_node=8, cpus_per_node=96, mem_gb=960, time_limit_min=1440
    )
    assert job.cluster == Cluster(
        name="big",
        partition="gpu",
        gpus_per_node=8,
        cpus_per_node=96,
        mem_gb=960,
        max_nodes=16,
        time_limit="24:00:00",
        setup=("module load cuda",),
        env={"A": "1"},
        sbatch={"exclusive": True},
    )
    assert job_of(project, "+cluster=small", "nodes=2").resources.world_size == 8


def test_the_command_line_wins_over_the_cluster(project: Path) -> None:
    job = job_of(project, "+cluster=big", "partition=low", "account=me", "time_limit=90m", "mem_gb=12.5")
    assert (job.cluster.partition, job.cluster.account, job.cluster.qos) == ("low", "me", None)
    assert (job.resources.time_limit_min, job.resources.mem_gb) == (90, 12.5)
    job = job_of(
        project, "+cluster=big", "cluster.partition=x", "cluster.sbatch.comment=hi", "cluster.env.B='a b'"
    )
    assert job.cluster.partition == "x"
    assert job.cluster.sbatch == {"exclusive": True, "comment": "hi"}
    assert job.cluster.env == {"A": "1", "B": "a b"}


def test_part_of_a_node_takes_part_of_its_cpus_and_memory(project: Path) -> None:
    resources = job_of(project, "+cluster=big", "gpus_per_node=2").resources
    assert (resources.cpus_per_node, resources.mem_gb, resources.ranks_per_node) == (24, 240, 2)
    assert (
        job_of(project, "+cluster=big", "gpus_per_node=2", "cpus_per_node=96").resources.cpus_per_node == 96
    )
    assert job_of(project, "+cluster=big", "ranks_per_node=4").resources.gpus_per_node == 4


def test_a_cluster_job_can_be_tried_here(project: Path) -> None:
    job = job_of(project, "+cluster=big", "nodes=2", "gpus_per_node=2", "launcher=local")
    assert (job.launcher, job.resources.nodes, job.resources.ranks_per_node) == ("local", 2, 2)
    assert job.python == sys.executable


@pytest.mark.parametrize("spelling", ["cluster=big", "+cluster=big", "++cluster=big", "cluster='big'"])
def test_a_cluster_needs_no_plus(project: Path, spelling: str) -> None:
    assert job_of(project, spelling).cluster.name == "big"


def test_the_projects_files_are_found_before_the_shipped_ones(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", cluster__cpu="partition: mine\nranks_per_node: 3\n")
    assert job_of(project, "+cluster=cpu").cluster.partition == "mine"
    assert job_of(project, "+cluster=h100x8").cluster.name == "h100x8"


def test_the_shipped_configuration_works_without_a_project(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    assert job.program.target == "slurmddp.training.trainer.train"
    assert job.resources.world_size == 2
    for name in ("a100x8", "h100x8", "cpu", "sandbox"):
        assert job_of(tmp_path, f"+cluster={name}").cluster.name == name


def test_a_configuration_of_another_program_is_not_read(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", config="lr: 3\ndefaults: [nonsense]\n")
    assert job_of(project).run_name == job_of(make_project(tmp_path / "q")).run_name


def test_a_configuration_that_is_not_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = make_project(tmp_path / "p", config="lr: 3\n")
    (project / "train.py").write_text("")
    monkeypatch.chdir(project)

    def told(*arguments: str) -> str:
        assert main(["train", "--cfg", *arguments]) == 0
        return capsys.readouterr().err

    assert "conf/config.yaml is not read" in told() and "conf/slurmddp.yaml" in told()
    assert told("program.script=train.py") == ""  # the script may read it
    (project / "conf" / "slurmddp.yaml").write_text("nodes: 1\n")
    assert told() == ""


def test_memory_that_no_job_asks_for_is_named(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p")

    def notes(*arguments: str) -> list[str]:
        return unread(compose(arguments, project), project)

    assert "mem_gb=7 has no effect" in notes("+cluster=sandbox", "mem_gb=7")[0]
    assert notes("+cluster=sandbox") == notes("+cluster=cpu", "mem_gb=7") == notes("mem_gb=7") == []


def test_a_projects_defaults_lie_between_the_shipped_ones_and_the_command_line(tmp_path: Path) -> None:
    defaults = (
        "defaults:\n  - model: tiny\n  - cluster: big\nnodes: 2\ntrain: {steps: 7}\nmodel: {width: 5}\n"
    )
    project = make_project(
        tmp_path / "p",
        slurmddp=defaults,
        model__tiny="_target_: slurmddp.training.builtin.gpt.GPT\nwidth: 1\ndepth: 2\n",
    )
    job = job_of(project, "train.batch_size=3")
    assert job.cluster.name == "big" and job.resources.nodes == 2
    assert job.program.config["train"]["steps"] == 7 and job.program.config["train"]["batch_size"] == 3
    assert job.program.config["model"] == {
        "_target_": "slurmddp.training.builtin.gpt.GPT",
        "width": 5,
        "depth": 2,
    }
    other = job_of(project, "cluster=null", "model=gpt_small", "nodes=1")
    assert other.launcher == "local" and other.program.config["model"]["width"] == 5


def test_a_group_of_the_projects_own(tmp_path: Path) -> None:
    experiment = "# @package _global_\nseed: 5\ntrain: {steps: 9}\n"
    project = make_project(tmp_path / "p", experiment__long=experiment)
    for spelling in ("experiment=long", "+experiment=long"):
        chosen = job_of(project, spelling).program.config
        assert (chosen["seed"], chosen["train"]["steps"]) == (5, 9)
    with pytest.raises(ConfigError, match=r"no experiment 'lnog'.*Did you mean long"):
        job_of(project, "experiment=lnog")


def test_another_class_starts_without_the_keys_of_the_first(project: Path) -> None:
    (project / "net.py").write_text("class Net: ...\n")
    job = job_of(project, "model._target_=net.Net", "model.depth=3", "optimizer._target_=torch.optim.SGD")
    assert job.program.config["model"] == {"_target_": "net.Net", "depth": 3}
    assert job.program.config["optimizer"] == {"_target_": "torch.optim.SGD"}
    assert job.name == "net"
    kept = job_of(project, "model=gpt_small", "model._target_=net.Net").program.config["model"]
    assert kept == {"_target_": "net.Net", "vocab_size": 99, "width": 64}


def test_a_whole_training_function_comes_in_by_its_import_path(project: Path) -> None:
    (project / "mine.py").write_text("def train(distributon, config, folder): ...\n")
    job = job_of(project, "program._target_=mine.train", "program.extra=1")
    assert job.program.target == "mine.train" and job.program.config["program"]["extra"] == 1


def test_a_strategy_has_its_own_options(project: Path) -> None:
    chosen = job_of(project, "+strategy.bucket_mb=5").program.config["strategy"]
    assert chosen == {"name": "ddp", "bucket_mb": 5}
    assert job_of(project, "strategy=single").resources.world_size == 1


def test_no_scheduler(project: Path) -> None:
    assert job_of(project, "scheduler=null").program.config["scheduler"] is None


def test_interpolations_are_resolved_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/data; $x")
    resolved = compose(["+model.place=${oc.env:WHERE}", "+model.at=${now:%Y}"], project)["model"]
    assert resolved["vocab_size"] == 99 and resolved["place"] == "/data; $x" and resolved["at"].isdigit()


def test_values_of_the_environment_are_known_as_such(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")
    monkeypatch.setenv("WIDTH", "32")
    typed = [
        "+data.token=${oc.env:TOKEN}",
        "+data.url='https://x/${data.token}'",
        'model.width="${oc.decode:${oc.env:WIDTH}}"',
        "program.script=t.py",
        "program.args=[--token,'${oc.env:TOKEN}']",
        "+cluster=small",
    ]
    (project / "t.py").touch()
    job = job_of(project, *typed)
    config_, marks = job.program.config, {
        "data": {"token": "${oc.env:TOKEN}", "url": "https://x/${data.token}"},
        "model": {"width": "${oc.decode:${oc.env:WIDTH}}"},
        "program": {"args": {1: "${oc.env:TOKEN}"}},
    }  # fmt: skip
    assert config_["from_environment"] == marks
    assert (config_["data"]["token"], config_["model"]["width"]) == ("s3cret", 32)
    shown = config_secrets.without_environment(config_)
    assert shown["data"]["url"] == "https://x/${data.token}" and shown["program"]["args"][0] == "--token"
    assert "s3cret" not in yaml.safe_dump(shown) and "from_environment" not in shown
    folder = create.prepare(job, None)
    again = job_of_run(folder, ["nodes=1"])
    assert again.program.config["from_environment"] == marks
    assert (again.run_name, job_of(project, *typed).run_name) == (job.run_name, job.run_name)


def test_the_stored_configuration_is_plain_and_whole(project: Path) -> None:
    job = job_of(project, "+cluster=big", "nodes=2")
    stored = yaml.safe_load(yaml.safe_dump(dict(job.program.config), sort_keys=False))
    assert stored == job.program.config
    assert [*stored] == [*TOP, "project_dir"]
    assert (stored["nodes"], stored["ranks_per_node"], stored["gpus_per_node"]) == (2, 8, 8)
    assert (stored["launcher"], stored["project_dir"]) == ("slurm", str(project))


WHERE = [
    "partition=x", "account=x", "qos=x", "time_limit=5", "mem_gb=3", "cpus_per_node=5",
    "policy.max_restarts=9", "submitter=submitit", "runs_dir=other", "snapshot=false", "launcher=local",
    "cluster.time_limit=7", "cluster.setup=[]", "spare_nodes=1", "elastic=true", "preflight=on",
    "train.memory_save_every=7", "policy.stall_timeout_s=9", "train.log_every=1", "train.eval_every=7",
    "train.save_every=7", "train.keep_last=9", "train.sample_chars=0", "train.workers=2",
]  # fmt: skip
WHAT = [
    "nodes=2", "gpus_per_node=4", "seed=1", "model.width=65", "data.vocab_size=98", "optimizer.lr=0.1",
    "scheduler=null", "train.steps=401", "train.batch_size=17", "loss._partial_=false", "program.x=1",
    "train.global_batch=64", "train.eval_batches=5", "train.clip_norm=2", "train.accumulate=3",
]  # fmt: skip


@pytest.mark.parametrize("override", WHERE)
def test_where_and_how_long_leave_the_name_alone(project: Path, override: str) -> None:
    assert job_of(project, "+cluster=big", override).run_name == job_of(project, "+cluster=big").run_name


def test_new_keys_renamed_no_run(project: Path) -> None:
    """The digits that this configuration had before there were the keys that say how, not what."""
    config = json.dumps(job_of(project, "+cluster=big", "nodes=2").program.config)
    assert fingerprint(json.loads(config.replace(".training.builtin.", ".training."))) == "6ebe84ae"


@pytest.mark.parametrize("override", WHAT)
def test_what_is_computed_changes_the_name(project: Path, override: str) -> None:
    override = override.replace("program.x", "+program.x")
    assert job_of(project, "+cluster=big", override).run_name != job_of(project, "+cluster=big").run_name


def test_the_name_does_not_depend_on_order_place_or_process(project: Path, tmp_path: Path) -> None:
    other = make_project(tmp_path / "other place")
    names = {
        job_of(project, "nodes=2", "seed=3").run_name,
        job_of(project, "seed=3", "nodes=2").run_name,
        job_of(other, "seed=3", "nodes=2").run_name,
    }
    code = (
        "import sys; from pathlib import Path\n"
        "from slurmddp.config.compose import compose; from slurmddp.config.job import build_job\n"
        "p = Path(sys.argv[1]); c = compose(['nodes=2', 'seed=3'], p)\n"
        "print(build_job(c, project_dir=p).run_name)"
    )
    command = [sys.executable, "-c", code, str(project)]
    names.add(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    assert len(names) == 1
    assert job_of(project, "nodes=2", "seed=3", "name=mine").run_name == f"mine-{names.pop()[-8:]}"


@pytest.mark.parametrize("key", [key for key in free_keys() if "." in key])
def test_a_run_that_goes_on_may_change_what_changes_no_number(project: Path, key: str) -> None:
    section, _, name = key.partition(".")
    given = "program.script=mine.py" if section == "program" else "seed=0"
    (project / "mine.py").touch()
    run = prepared(project, given)
    again = job_of_run(run, [f"{key}='3'" if section == "program" else f"{key}=3"])
    assert str(again.program.config[section][name]) == "3"


def prepared(project: Path, *overrides: str) -> RunFolder:
    job = job_of(project, *overrides)
    folder = RunFolder(job.run_dir)
    folder.path.mkdir(parents=True)
    folder.config_file.write_text(yaml.safe_dump(dict(job.program.config), sort_keys=False))
    folder.overrides_file.write_text("".join(f"'{word}'\n" for word in overrides))
    return folder


def test_a_run_gives_its_job_back(project: Path) -> None:
    overrides = ["+cluster=big", "nodes=2", "name=a", "+model.note='two words'"]
    folder = prepared(project, *overrides)
    again, first = job_of_run(folder), job_of(project, *overrides)
    assert json.dumps(again.program.config) == json.dumps(first.program.config)
    assert (again.run_dir, again.run_name, again.resources) == (
        first.run_dir,
        first.run_name,
        first.resources,
    )
    assert again.cluster == first.cluster and again.project_dir == project


def test_a_run_keeps_its_folder_when_slurmddp_would_name_it_otherwise(project: Path) -> None:
    folder = prepared(project)
    moved = folder.path.with_name("gpt-00000000.old-1")
    folder.path.rename(moved)
    assert job_of_run(RunFolder(moved)).run_dir == moved


def test_a_run_goes_on_elsewhere_and_longer(project: Path) -> None:
    folder = prepared(project, "+cluster=big", "gpus_per_node=2")
    changes = ["time_limit=2-00:00:00", "partition=long", "policy.max_restarts=9", "cluster.qos=night"]
    job = job_of_run(folder, changes)
    assert job.resources.time_limit_min == 2880
    assert (job.cluster.partition, job.cluster.qos, job.policy.max_restarts) == ("long", "night", 9)
    assert job.overrides == ("+cluster=big", "gpus_per_node=2", *changes)
    moved = job_of_run(folder, ["cluster=h100x8"])
    assert (moved.cluster.name, moved.resources.gpus_per_node) == ("h100x8", 2)
    assert job_of_run(folder, ["launcher=local"]).launcher == "local"


def test_a_run_that_is_older_than_some_keys_goes_on_with_their_defaults(project: Path) -> None:
    folder = prepared(project, "+cluster=big")
    older = folder.config()
    for section, names in ((older, ("spare_nodes", "elastic", "preflight")), (older["policy"], ("grace_s",))):
        for key in names:
            del section[key]
    del older["train"]["memory_save_every"]
    older["train"]["steps"] = 77
    folder.config_file.write_text(yaml.safe_dump(older, sort_keys=False))
    job = job_of_run(folder, ["spare_nodes=1", "train.memory_save_every=5"])
    assert (job.resources.spare_nodes, job.elastic) == (1, False)
    assert [job.program.config["train"][key] for key in ("steps", "memory_save_every")] == [77, 5]


@pytest.mark.parametrize(("said", "meant"), [("on", True), ("true", True), ("off", False), ("false", False)])
def test_a_flag_is_on_or_off_in_a_file_and_on_the_command_line(
    tmp_path: Path, said: str, meant: bool
) -> None:
    plain = make_project(tmp_path / "plain")
    assert job_of(plain, f"preflight={said}").program.config["preflight"] is meant
    own = make_project(tmp_path / "own", slurmddp=f"preflight: {said}\nelastic: {said}\n")
    assert job_of(own).program.config["preflight"] is meant
    assert job_of(own).elastic is meant


def test_an_elastic_run_holds_the_samples_of_its_steps(project: Path) -> None:
    """On fewer nodes each step is as large as before, and its name and numbers are those of a plain run."""
    job = job_of(project, "+cluster=big", "nodes=3", "train.accumulate=2", "elastic=true")
    assert job.program.config["train"]["global_batch"] == 16 * 2 * 24
    assert GlobalBatch(16 * 2 * 24).share(24, most=16) == (16, 2)
    assert GlobalBatch(16 * 2 * 24).share(16, most=16) == (16, 3)
    given = job_of(project, "+cluster=big", "nodes=3", "train.global_batch=48", "elastic=true")
    assert given.program.config["train"]["global_batch"] == 48
    assert given.outlives_nodes and not job_of(project).outlives_nodes


@pytest.mark.parametrize(
    ("samples", "nodes", "ranks_per_node", "most"), [(48, 3, 8, 3), (48, 5, 2, 4), (6, 4, 2, 3), (5, 3, 2, 0)]
)
def test_so_many_nodes_share_a_step(samples: int, nodes: int, ranks_per_node: int, most: int) -> None:
    assert GlobalBatch(samples).most_nodes(nodes, ranks_per_node) == most


def test_a_run_goes_on_at_another_size_with_the_same_steps(project: Path) -> None:
    folder = prepared(project, "+cluster=big", "nodes=4", "train.accumulate=2")
    assert folder.config()["train"]["global_batch"] is None
    job = job_of_run(folder, ["nodes=2", "gpus_per_node=4"])
    assert (job.resources.nodes, job.resources.ranks_per_node, job.resources.gpus_per_node) == (2, 4, 4)
    assert job.run_dir == folder.path
    assert job.program.config["train"]["global_batch"] == 16 * 2 * 32
    assert [job.program.config["train"][key] for key in ("batch_size", "accumulate")] == [16, 2]
    folder.config_file.write_text(yaml.safe_dump(dict(job.program.config), sort_keys=False))
    again = job_of_run(folder, ["nodes=1", "ranks_per_node=1"])
    assert (again.resources.ranks_per_node, again.resources.gpus_per_node) == (1, 1)
    assert again.program.config["train"]["global_batch"] == 1024


def test_a_global_batch_that_the_ranks_cannot_share_is_refused(project: Path) -> None:
    settings = ["nodes=3", "ranks_per_node=2"]
    with pytest.raises(ConfigError, match=r"Each optimizer step has 32 samples.*6 ranks.*1, 2, 4, 8, 16, 32"):
        job_of(project, *settings, "train.global_batch=32")
    assert job_of(project, *settings, "train.global_batch=36").resources.nodes == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.steps=9", "changes what gpt-.* computes.*Start a new run"),
        ("nodes=3", r"128 samples.*24 ranks.*Numbers of ranks that work: 1, 2, 4, 8, 16, 32, 64, 128"),
        ("name=x", "changes what"),
        ("~policy", "changes what"),
        ("time_limit", "no value"),
        ("time_limit=soon", "not a time"),
        ("policy.max_restart=1", "Did you mean policy.max_restarts"),
        ("cluster=h100", "no cluster 'h100'"),
        ("cluster=small", "more than a node of cluster small has"),
        ("account=a;b", "can't be read"),
    ],
)
def test_a_run_that_goes_on_computes_the_same(project: Path, change: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        job_of_run(prepared(project, "+cluster=big"), [change])


def test_the_strategies_are_those_that_have_a_file() -> None:
    strategies = {str(keys(one)["name"].default) for one in TOP["strategy"].sections}
    assert set(options([CONF], "strategy")) == strategies
