"""Every wrong value is refused in one paragraph that says what to do; nothing is written or queued."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from slurmddp.cli.main import main
from slurmddp.config.compose import compose
from slurmddp.config.hydra_errors import quoted
from slurmddp.config.job import build_job
from slurmddp.errors import EXIT_CONFIG, EXIT_USAGE, ConfigError
from slurmddp.slurm.script import render
from support.runs.projects import make_project

BIG = "+cluster=big"
CASES = {
    "unknown key": (["node=3"], "`node` is not a key.*Did you mean nodes"),
    "unknown key of train": (["train.stepz=3"], "`train.stepz`.*Did you mean train.steps"),
    "a key of train at the top": (["steps=3"], "Did you mean train.steps"),
    "a key of the optimizer at the top": (["lr=3"], "`lr` is not a key.*Did you mean optimizer.lr\\?"),
    "a key of the optimizer in train": (["train.lr=3"], "`train.lr` is not.*Did you mean optimizer.lr\\?"),
    "a top key in train": (["train.seed=3"], "Did you mean seed\\?"),
    "the beginning of a key": (["gpus=3"], "Did you mean gpus_per_node\\?"),
    "unknown section": (["trian.steps=3"], "`trian`.*Did you mean train"),
    "unknown key of the cluster": ([BIG, "cluster.partitoin=x"], "Did you mean cluster.partition"),
    "unknown key of the policy": (
        ["policy.max_restart=3"],
        "Did you mean policy.max_restarts or",
    ),
    "unknown key of a node": (
        ["model.widht=3"],
        "`model` has no key 'widht'. Did you mean model.width.*\\+model.widht",
    ),
    "unknown key far from all": (["+zzz.y=3"], "`zzz` is not a key.*Known: account"),
    "unknown cluster": (["+cluster=a100x9"], "no cluster 'a100x9'.*looked in .*conf/cluster and .*a100x8"),
    "unknown choice": (["model=gtp_small"], "no model 'gtp_small'.*Did you mean gpt_small"),
    "unknown strategy": (["strategy.name=dpp"], "one of ddp, single. Did you mean ddp"),
    "unknown option of a strategy": (["strategy.bucket_md=3"], "Did you mean strategy.bucket_mb"),
    "an option of another strategy": (["strategy=single", "+strategy.bucket_mb=3"], "strategy.bucket_mb"),
    "several ranks without a strategy for them": (
        ["strategy=single", "nodes=2"],
        "one rank, and this job has 2",
    ),
    "no cluster": (["+cluster="], "`cluster=` names no choice. Known: .*big"),
    "a list of clusters": (["+cluster=[big]"], "names no choice. Did you mean big"),
    "an absurd seed": (["seed=99999999999999999999999999"], "at most 9223372036854775807"),
    "only spaces": ([BIG, 'partition="  "'], "`partition` is '  '"),
    "no loss": (["loss=null"], "`loss` is empty"),
    "the main module": (["model._target_=__main__.Net"], "no module '__main__'"),
    "the argument of Hydra's flag": (["job"], "'job' has no value.*`--cfg` takes no value"),
    "no script named": (["program.script="], "`program.script` is empty, but must be a text"),
    "a launcher like no other": (["launcher=moon"], r"one of auto, local, slurm\.$"),
    "unknown launcher": (["launcher=slrum"], "one of auto, local, slurm. Did you mean slurm"),
    "a name alone": (["big"], "Did you mean \\+cluster=big"),
    "a key alone": (["nodes"], "has no value. Say nodes=VALUE"),
    "no key": (["=3"], "not a setting"),
    "a cluster's key without a cluster": (["cluster.partition=x"], "no cluster is chosen"),
    "slurm without a cluster": (["launcher=slurm"], "needs a cluster"),
    "hydra's own keys": (["hydra.run.dir=x"], "sets Hydra itself"),
    "text for a number": (["nodes=two"], "`nodes` is 'two' \\(a text\\), but must be a whole number"),
    "fraction": (["nodes=1.5"], "whole number"),
    "true for a number": (["nodes=true"], "whole number"),
    "mapping for a text": (["account={a: 1}"], "must be a text"),
    "number for a mapping": (["train=3"], "must be a mapping"),
    "empty": (["name="], "`name` is empty"),
    "nothing": (["nodes=null"], "`nodes` is empty"),
    "infinite": (["train.clip_norm=.inf"], "clip_norm"),
    "no nodes": (["nodes=0"], "at least 1"),
    "gradients of length 0": (["train.clip_norm=0"], "`train.clip_norm` is 0.*above 0.*train.clip_norm=null"),
    "messages of size 0": (["strategy.bucket_mb=0"], "above 0.*strategy.bucket_mb=null"),
    "no ranks": (["ranks_per_node=0"], "at least 1"),
    "negative seed": (["seed=-1"], "at least 0"),
    "no steps": (["train.steps=0"], "at least 1"),
    "one checkpoint": (["train.keep_last=1"], "at least 2"),
    "too many nodes": ([BIG, "nodes=17"], "more than the 16 that cluster big"),
    "too many GPUs": ([BIG, "gpus_per_node=9"], "more than a node of cluster big has \\(8 GPUs\\)"),
    "too many nodes with the spares": (
        [BIG, "nodes=15", "spare_nodes=2"],
        "nodes=15 with spare_nodes=2 is more than the 16 that cluster big.*16 nodes or less in all",
    ),
    "a spare of one machine": (["spare_nodes=1"], "this job has one node.*nodes=2"),
    "fewer spares than none": ([BIG, "spare_nodes=-1"], "`spare_nodes` is -1.*at least 0"),
    "unknown key near a new one": (["spare_node=1"], "Did you mean spare_nodes"),
    "a key of the policy at the top": (["max_restarts_in_place=1"], "mean policy.max_restarts_in_place"),
    "no flag": (["preflight=onn"], "`preflight` is 'onn'.*true or false \\(or on, off\\)"),
    "a number for a flag": (["elastic=2"], "`elastic` is 2.*true or false"),
    "no interval": (
        ["train.memory_save_every=often"],
        "must be auto or a whole number.*memory_save_every=auto",
    ),
    "a negative interval": (["train.memory_save_every=-1"], "at least 0"),
    "a unit": (["policy.stall_timeout_s=5m"], "'5m' \\(a text\\), but must be a number \\(seconds"),
    "nodes that don't wait": (["policy.join_timeout_s=0"], "at least 1"),
    "restarts below none": (["policy.max_restarts_in_place=-1"], "at least 0"),
    "GPUs where there are none": (["+cluster=small", "gpus_per_node=1"], "has \\(no GPUs\\)"),
    "more ranks than GPUs": ([BIG, "ranks_per_node=9"], "more than the 8 GPUs"),
    "ranks beside GPUs": ([BIG, "ranks_per_node=3", "gpus_per_node=2"], "one of the two"),
    "too many processes here": (["nodes=99999999999999999999"], "can't be tried on this machine"),
    "no time": ([BIG, "time_limit=never"], "is not a time.*HH:MM:SS"),
    "zero time": ([BIG, "time_limit=0"], "no time at all"),
    "less time than the signal needs": ([BIG, "time_limit=2"], "signal_lead_s=120"),
    "missing data": (["+data.path=/no/such/place"], "no data at /no/such/place.*'no' in it does not"),
    "missing data, relative": (["+data.root=cnof"], "cnof.*Did you mean conf"),
    "a script alone": (
        ["fit.py"],
        "'fit.py' is a script, not a setting. A script runs as `slurmddp run fit.py`",
    ),
    "missing script": (["program.script=trian.py"], "no script .*trian.py.*program.script"),
    "arguments without a script": (
        ["program.args=--epochs"],
        "`program.args`.*no script.*slurmddp run FILE.py",
    ),
    "arguments that are never closed": (
        ["program.script=conf/model/gpt_small.yaml", "program.args=[--epochs"],
        "not closed at its end. Write them as in a shell: program.args='--epochs 20'",
    ),
    "missing package": (["model._target_=tourch.Net"], "no module 'tourch'.*Did you mean.*torch"),
    "no import path": (["model._target_=Net"], "not an import path"),
    "code in an import path": (["model._target_=os.system('x')"], "can't be read|not an import path"),
    "no target": (["~model._target_"], "has no `_target_`"),
    "no model": (["model=null"], "`model` is missing"),
    "several values": (["train.steps=1,2"], "asks for several runs.*one command each"),
    "several choices": (["model=gpt_small,other"], "several choices"),
    "a name with spaces": (["name=two words"], "letters, digits.*name=two-words"),
    "a name with a slash": (["name=../x"], "letters, digits"),
    "a name that is a flag": (["name=-x"], "must begin with"),
    "a command in a name": (["name=x; rm -rf /"], "can't be read.*quote it.*'name=\"x; rm -rf /\"'"),
    "a quoted command in a name": (['name="x; rm -rf /"'], "letters, digits"),
    "a variable in a name": (["name=$HOME"], "letters, digits.*name=HOME"),
    "a line break in a value": (["partition=a\nb"], "can't be read"),
    "a quoted line break in a value": ([BIG, 'partition="a\nb"'], "line break or another control character"),
    "an open quote": (["account='x"], "never closed"),
    "an open bracket": (["account=[1"], "never closed"),
    "an unknown reference": (["name=${nope}"], "taken from `nope`"),
    "an unknown resolver": (["name=${nope:1}"], "\\$\\{nope:...\\}, which is not known"),
    "a reference to what is gone": (
        ["~data.vocab_size"],
        "`model.vocab_size` is taken from `data.vocab_size`",
    ),
    "a key to take away that is not there": (["~model.nothing"], "not there"),
    "options of ours in sbatch": ([BIG, "cluster.sbatch.nodes=3"], "slurmddp writes itself"),
    "an unknown key of instantiation": (
        ["+model._recursiv_=false"],
        "`model._recursiv_` is not understood. Did you mean _recursive_",
    ),
    "an unknown key of instantiation further in": (
        ["+model.inner={_target_: torch.nn.Linear, _convrt_: all}"],
        "`model.inner._convrt_` is not understood. Did you mean _convert_",
    ),
    "a conversion that there is not": (["+data._convert_=some"], "`data._convert_` is 'some'.*none, partial"),
    "a half-hearted recursion": (["+data._recursive_=maybe"], "`data._recursive_` is 'maybe'.*true or false"),
    "positional arguments that are no list": (["+model._args_=3"], "`model._args_` is 3.*a list"),
    "a job for another SLURM": (
        [BIG, "cluster.sbatch.clusters=other"],
        "sets clusters: the job would go to another SLURM.*login node of that cluster",
    ),
    "a line break in an sbatch option": ([BIG, 'cluster.sbatch.comment="a\nb"'], "cluster.sbatch"),
    "a line break in another sbatch option": (
        [BIG, 'cluster.sbatch.mail-user="a\nb"'],
        "`cluster.sbatch.mail-user` is 'a.*line break",
    ),
    "a list as an sbatch option": (
        [BIG, "cluster.sbatch.exclude=[n1,n2]"],
        "`cluster.sbatch.exclude` is \\['n1', 'n2'\\] \\(a list\\), but must be a text, a number or true",
    ),
    "a variable that is no name": ([BIG, "cluster.env={A-B: 1}"], "`cluster.env` has the name 'A-B'"),
    "a variable that is true": (
        [BIG, "cluster.env.FLAG=true"],
        "`cluster.env.FLAG` is True \\(true or false\\), but must be a text.*'cluster.env.FLAG=\"...\"'",
    ),
    "a variable that is a mapping": ([BIG, "cluster.env.X={a: 1}"], "`cluster.env.X` is .*a mapping"),
    "an empty variable": ([BIG, "cluster.env.X=null"], "`cluster.env.X` is empty, but must be a text"),
    "a set-up line that YAML takes for a mapping": (
        [BIG, "cluster.setup=[{export A: 1}]"],
        "`cluster.setup\\[0\\]` is .*a mapping.*but must be a shell line",
    ),
}


def everything_below(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize("flags", [[], ["--dry-run"]], ids=["train", "dry run"])
@pytest.mark.parametrize(("arguments", "words"), CASES.values(), ids=CASES)
def test_a_wrong_value_is_refused_before_anything_is_done(
    arguments: list[str],
    words: str,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    project = make_project(tmp_path / "project")
    monkeypatch.chdir(project)
    # Where SLURM is at hand, a mistake of ours must not reach it.
    monkeypatch.setenv("PATH", "/usr/bin/none:/bin/none")
    before = everything_below(tmp_path)
    code = main(["train", *flags, *arguments])
    output = capsys.readouterr()
    assert code == EXIT_CONFIG, output.err
    assert output.out == ""
    assert output.err.startswith("slurmddp: error: ") and output.err.count("\n") == 1, output.err
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        raise ConfigError(output.err)
    assert everything_below(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "no command 'trian'. Did you mean train"),
        (["train", "--dry-runn"], "no flag '--dry-runn'. Did you mean --dry-run"),
        (["train", "--dry"], "no flag '--dry'"),
        (["--hepl"], "Did you mean --help"),
        (
            ["train", "fit.py", "--lr", "3"],
            r"no flag '--lr'. A script runs as `slurmddp run \[settings\] fit.py --lr ...`",
        ),
        (["train", "--nodes=3"], "Settings have no dashes: nodes=3"),
        (["train", "--cluster=a100x8"], "Settings have no dashes: \\+cluster=a100x8"),
        (["train", "--steps", "3"], "no flag '--steps'. Settings have no dashes: train.steps=VALUE"),
        (["train", "--batch-size=8"], "Settings have no dashes: train.batch_size=8"),
        (["resume"], "arguments are required: RUN. See `slurmddp resume --help`"),
        (["nodes=3"], "slurmddp train nodes=3"),
        (["+cluster=a100x8"], "slurmddp train \\+cluster=a100x8"),
    ],
)
def test_a_wrong_command_line_names_the_near_one(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == EXIT_USAGE
    output = capsys.readouterr()
    assert output.err.count("\n") == 1 and output.out == ""
    with pytest.raises(ValueError, match=words):
        raise ValueError(output.err)


HOSTILE = [
    "two words",
    "it's",
    'say "hi"',
    "$HOME `id` $(id)",
    "; rm -rf /tmp/x",
    "a\\b",
    "#!{}%&*",
    "line\nbreak",
    "-x",
]


@pytest.mark.parametrize("value", HOSTILE)
def test_a_strange_value_arrives_as_it_was_given(value: str, tmp_path: Path) -> None:
    project = make_project(tmp_path / f"pro'ject $HOME; {HOSTILE.index(value)}")
    given = [BIG, f"+model.note={quoted(value)}", f"cluster.env.NOTE={quoted(value)}"]
    job = build_job(compose(given, project), project_dir=project, overrides=given)
    assert yaml.safe_load(yaml.safe_dump(dict(job.program.config)))["model"]["note"] == value
    assert job.cluster.env["NOTE"] == value
    export = f"NOTE={shlex.quote(value)}"
    assert export in render(job)
    script = f'{export}; [ -n "$NOTE" ] && printf %s "$NOTE"'
    assert subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout == value


@pytest.mark.parametrize("value", ["a b", "x'y", 'q"r', "$HOME", "; rm -rf /"])
def test_a_strange_slurm_option_is_quoted(value: str, tmp_path: Path) -> None:
    project = make_project(tmp_path / "p")
    job = build_job(compose([BIG, f"account={quoted(value)}"], project), project_dir=project)
    assert job.cluster.account == value
    line = next(line for line in render(job).splitlines() if line.startswith("#SBATCH --account="))
    assert shlex.split(line.removeprefix("#SBATCH ")) == [f"--account={value}"]


def test_a_value_that_hydra_cannot_read_works_as_the_hint_says(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p")
    for value in ("a;b", "it's;", 'x"y;', "a\\b;", 'a\\"b;', "a;\\"):
        with pytest.raises(ConfigError) as caught:
            compose([f"+model.note={value}"], project)
        (hinted,) = shlex.split(caught.value.hint.partition(": ")[2])
        assert compose([hinted], project)["model"]["note"] == value


def test_a_misspelled_class_of_the_project_is_seen_without_running_it(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p")
    (project / "net.py").write_text("raise SystemExit('was run')\nclass Network: ...\n")
    with pytest.raises(ConfigError, match=r"net\.py defines no 'Netwrok'. Did you mean Network"):
        compose(["model._target_=net.Netwrok"], project)
    assert compose(["model._target_=net.Network"], project)["name"] == "network"
    (project / "nets").mkdir()
    (project / "nets" / "__init__.py").write_text("from .deep import *\n")
    (project / "nets" / "deep.py").write_text("class Deep: ...\n")
    assert compose(["model._target_=nets.Deep"], project)["name"] == "deep"
    assert compose(["model._target_=nets.deep.Deep.build"], project)["name"] == "build"
    with pytest.raises(ConfigError, match="defines no 'Dep'"):
        compose(["model._target_=nets.deep.Dep"], project)
    (project / "broken.py").write_text("class Net:\n")
    with pytest.raises(ConfigError, match=r"broken\.py, line 1 is not valid Python"):
        compose(["model._target_=broken.Net"], project)


def test_another_interpreter_may_have_other_packages(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p")
    arguments = ["+cluster=big", "model._target_=only_there.Net"]
    with pytest.raises(ConfigError, match="no module 'only_there'"):
        compose(arguments, project)
    compose([*arguments, "cluster.python=/opt/python"], project)


def test_data_that_will_be_downloaded_need_not_be_there(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p")
    absent = compose(["+data.root=later", "+data.download=true"], project)["data"]
    assert (absent["root"], absent["download"]) == ("later", True)
    (project / "here").mkdir()
    assert compose(["+data.root=here", "+data.inner={path: conf/model}"], project)["data"]["root"] == "here"
    with pytest.raises(ConfigError, match="later"):
        compose(["+data.root=later"], project)


FILES = {
    "broken YAML": ("model/bad", "a: [1\n", "model=bad", r"bad\.yaml"),
    "a list instead of a mapping": ("model/bad", "- 1\n", "model=bad", "."),
    "a time without quotes": ("cluster/bad", "time_limit: 24:00:00\n", "+cluster=bad", '"24:00:00"'),
    "an unknown key in a cluster file": (
        "cluster/bad",
        "partitoin: x\n",
        "+cluster=bad",
        "Did you mean cluster.partition",
    ),
    "a YAML file that holds itself": ("cluster/bad", "env: &a [*a]\n", "+cluster=bad", "refers to itself"),
    "a missing file of a group": (
        "experiment/bad",
        "defaults:\n  - /model: nope\n",
        "experiment=bad",
        "nope",
    ),
    "a value that must be given": (
        "cluster/bad",
        "account: ???\n",
        "+cluster=bad",
        "`cluster.account` must be given",
    ),
    "broken defaults of the project": ("slurmddp", "nodes: [\n", "nodes=1", r"slurmddp\.yaml can't be read"),
    "defaults that are no mapping": ("slurmddp", "- nodes\n", "nodes=1", "holds no mapping"),
    "an unknown choice in the defaults": (
        "slurmddp",
        "defaults:\n  - model: gtp_small\n",
        "nodes=1",
        "Did you mean gpt",
    ),
    "choices that are no list": ("slurmddp", "defaults: gpt\n", "nodes=1", "not a list"),
    "a choice without a group": ("slurmddp", "defaults: [gpt]\n", "nodes=1", "holds 'gpt'"),
    "Hydra's keys in the defaults": (
        "slurmddp",
        "hydra:\n  searchpath: [file:///x]\n",
        "nodes=1",
        "slurmddp.yaml sets `hydra`.*conf/",
    ),
    "an unknown key in the defaults": ("slurmddp", "node: 3\n", "nodes=1", "Did you mean nodes"),
}


@pytest.mark.parametrize(("name", "text", "argument", "words"), FILES.values(), ids=FILES)
def test_a_wrong_file_is_refused(name: str, text: str, argument: str, words: str, tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", **{name: text})
    with pytest.raises(ConfigError, match=words) as caught:
        compose([argument], project)
    assert "\n" not in str(caught.value) and caught.value.hint


@pytest.mark.parametrize(("name", "words"), [("a${b", "Hydra reads"), ("a\nb", "line break")])
def test_a_folder_that_cannot_be_told_is_refused(name: str, words: str, tmp_path: Path) -> None:
    project = make_project(tmp_path / name)
    with pytest.raises(ConfigError, match=words):
        build_job(compose([BIG], project), project_dir=project)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p")
    (project / "conf" / "slurmddp.yaml").write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(ConfigError, match="can't be read"):
        compose([], project)
