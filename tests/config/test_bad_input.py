"""Every wrong value is refused in one paragraph that says what to do; nothing is written or queued."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from slurmddp.cli.main import main
from slurmddp.config.composition.compose import compose
from slurmddp.config.composition.hydra_errors import quoted
from slurmddp.config.job import build_job
from slurmddp.errors import EXIT_CONFIG, ConfigError
from slurmddp.slurm.script import render
from support.runs.projects import make_project

BIG = "+cluster=big"
TOO_LITTLE = [
    "nodes=0", "ranks_per_node=0", "spare_nodes=-1", "seed=-1", "train.steps=0", "train.keep_last=1",
    "train.memory_save_every=-1", "policy.max_restarts_in_place=-1", "policy.join_timeout_s=0",
]  # fmt: skip
CASES = {
    **{typed: "`{}` is .*at least".format(typed.partition("=")[0]) for typed in TOO_LITTLE},
    "node=3": "`node` is not a key.*Did you mean nodes",
    "train.stepz=3": "`train.stepz`.*Did you mean train.steps",
    "lr=3": "`lr` is not a key.*Did you mean optimizer.lr\\?",
    "train.lr=3": "`train.lr` is not.*Did you mean optimizer.lr\\?",
    "train.seed=3": "Did you mean seed\\?",
    "gpu=3": "Did you mean gpus",
    "trian.steps=3": "`trian`.*Did you mean train",
    (BIG, "cluster.partitoin=x"): "Did you mean cluster.partition",
    "train=3": "`train` is '3', but must be a mapping.*Use train.KEY=VALUE",
    "model.widht=3": "GPT takes no argument 'widht'. It takes vocab_size, .*Did you mean model.width",
    "optimizer.amsgrda=true": "AdamW takes no argument 'amsgrda'. It takes .*Did you mean optimizer.amsgrad",
    "+zzz.y=3": "`zzz` is not a key.*Known: account",
    "+cluster=a100x9": "no cluster 'a100x9'.*looked in .*conf/cluster and .*a100x8",
    "model=gtp_small": "no model 'gtp_small'.*Did you mean gpt_small",
    "strategy.name=dpp": "Did you mean ddp",
    "strategy=dpp": "Did you mean ddp",
    "strategy=torhc.Mean": "there is no module 'torhc'",
    "strategy.bucket_md=3": "Did you mean strategy.bucket_mb",
    ("strategy=single", "+strategy.bucket_mb=3"): "strategy.bucket_mb",
    ("strategy=single", "nodes=2"): "one rank, but this job has 2",
    "+cluster=": "`cluster=` names no choice. Known: .*big",
    "+cluster=[big]": "names no choice. Did you mean big",
    "seed=99999999999999999999999999": "at most 9223372036854775807",
    (BIG, 'partition="  "'): "`partition` is '  '",
    "train.max_time=soon": "train.max_time='soon' is not a time.*HH:MM:SS",
    "train.max_time=0": "train.max_time=0 is not above 0",
    "train.best=accuracy": "can't be chosen by 'accuracy'.*\"max accuracy\"",
    "train.best=max f1": "`train.best` names 'f1', which is not a metric. .*eval_loss",
    "metrics=3": "no metrics '3'.*accuracy",
    "metrics.f1=3": "`metrics.f1` is 3 \\(a whole number\\), but must be a mapping with a `_target_`",
    "metrics.f1.x=3": "`metrics.f1` has no `_target_`",
    "metrics.f1._target_=torcch.f1": "`metrics.f1._target_` is torcch.f1, but there is no module",
    "metrics.eval_loss._target_=torch.sum": "the name 'eval_loss', which slurmddp itself uses",
    "metrics.images_per_s._target_=torch.sum": "the name 'images_per_s', which slurmddp itself uses",
    "++metrics={a-b:{_target_:torch.sum}}": "`metrics` has an entry with the invalid name 'a-b'",
    "loss@loss=x": "'loss@loss' is to replace a choice.*Use loss=NAME to choose",
    "model._target_=__main__.Net": "no module '__main__'",
    "program.script=": "`program.script` is empty, but must be a text",
    "launcher=moon": r"one of auto, local, slurm\.$",
    "launcher=slrum": "one of auto, local, slurm. Did you mean slurm",
    "big": "Did you mean cluster=big",
    "nodes": "has no value. Use nodes=VALUE",
    "train.steps": r"'train.steps' has no value. Use train.steps=VALUE\.$",
    "=3": "not a setting",
    "cluster.partition=x": "no cluster is chosen",
    "launcher=slurm": "needs a cluster",
    "backend=glo": "`backend` can't be 'glo'.*Did you mean gloo.*package.module.Class",
    "backend=nowhere.Net": "`backend` is nowhere.Net, but there is no module 'nowhere'",
    "backend='cpu:nowhere.Net,cuda:nccl'": "`backend` is nowhere.Net, but there is no module 'nowhere'",
    "backend='cpu:gloo,cuda:ncl'": "`backend` can't be 'ncl'.*Did you mean nccl",
    "hydra.run.dir=x": "is a setting of Hydra itself",
    "nodes=two": "`nodes` is 'two' \\(a text\\), but must be a whole number",
    "nodes=1.5": "whole number",
    "nodes=true": "whole number",
    "account={a: 1}": "must be a text",
    "name=": "`name` is empty",
    "train.steps=null": "`train.steps` is empty",
    "train.clip_norm=.inf": "clip_norm",
    "train.clip_norm=0": "`train.clip_norm` is 0.*above 0.*train.clip_norm=null",
    "strategy.bucket_mb=0": "above 0.*strategy.bucket_mb=null",
    (BIG, "nodes=17"): "more than max_nodes=16 of cluster big",
    (BIG, "gpus_per_node=9"): "more than a node of cluster big has \\(8 GPUs\\)",
    (BIG, "nodes=15", "spare_nodes=2"): (
        "nodes=15 with spare_nodes=2 is more than max_nodes=16 of cluster big.*16 nodes or fewer in all"
    ),
    "spare_nodes=1": "this job has one node.*nodes=2",
    "preflight=onn": "`preflight` is 'onn'.*true or false \\(or on, off\\)",
    "elastic=2": "`elastic` is 2.*true or false",
    "train.memory_save_every=often": "must be auto or a whole number.*memory_save_every=auto",
    "policy.stall_timeout_s=5m": "'5m' \\(a text\\), but must be a number \\(seconds",
    ("+cluster=small", "gpus_per_node=1"): "has \\(no GPUs\\)",
    (BIG, "ranks_per_node=9"): "more than the 8 GPUs",
    (BIG, "ranks_per_node=3", "gpus_per_node=2"): "only one of these",
    (
        "+cluster=cpu",
        "ranks_per_node=1000",
    ): "node with 16 CPUs.*ranks_per_node=256 or less",
    "nodes=99999999999999999999": "too many for this machine",
    (BIG, "time_limit=never"): "is not a time.*HH:MM:SS",
    (BIG, "time_limit=0"): "time_limit=0 is not above 0",
    (BIG, "time_limit=2"): "signal_lead_s=120",
    "+data.path=/no/such/place": "no data at /no/such/place.*'no' in it does not",
    "+data.root=cnof": "cnof.*Did you mean conf",
    "+data.path=s3://bucket/corpus": "no data at .*s3:/bucket/corpus",
    "runs_dir=s3://bucket/runs": "`runs_dir` is s3://bucket/runs, an address.*must be the path of a folder",
    "fit.py": "'fit.py' is a script, not a setting. A script runs as `slurmddp run fit.py`",
    "program.script=trian.py": "no script .*trian.py.*program.script",
    "program.torchrun=true": "`program.torchrun` is no longer a setting.*run -n 1 -- torchrun .*FILE.py",
    "+program.torchrun=true": "`program.torchrun` is no longer a setting.*run -n 1 -- torchrun .*FILE.py",
    "begin=tomorrow": r"an option of sbatch. Write \+cluster\.sbatch\.begin=VALUE",
    (BIG, "cluster.mail_type=END"): r"an option of sbatch. Write \+cluster\.sbatch\.mail-type=VALUE",
    "policy.on_event='cat > event.json'": r"no program has this name.*\[sh, -c, \"cat > event\.json\"\]",
    "program.args=--epochs": "`program.args`.*no script.*slurmddp run FILE.py",
    ("program.script=conf/model/gpt_small.yaml", "program.args=[--epochs"): (
        "not closed at its end. Write them as in a shell: program.args='--epochs 20'"
    ),
    "model._target_=tourch.Net": "no module 'tourch'.*Did you mean.*torch",
    "model._target_=Net": "not an import path",
    "model._target_=os.system('x')": "can't be read|not an import path",
    "loggers=extend_list(csv)": r"extends a list, .*loggers=\[",
    "~model._target_": "has no `_target_`",
    "model=null": "`model` is missing",
    "train.steps=1,2": "a value for each of several runs.*add -m",
    "model=gpt_small,other": "several choices",
    "name=two words": "letters, digits.*name=two-words",
    "name=../x": "letters, digits",
    "name=-x": "must begin with",
    "name=x; rm -rf /": "can't be read.*quote it.*'name=\"x; rm -rf /\"'",
    'name="x; rm -rf /"': "letters, digits",
    "name=$HOME": "letters, digits.*name=HOME",
    "partition=a\nb": "can't be read",
    (BIG, 'partition="a\nb"'): "line break or another control character",
    "account='x": "is not closed",
    "account=[1": "is not closed",
    "name=${nope}": "taken from `nope`",
    "name=${nope:1}": "\\$\\{nope:...\\}, but no resolver has this name",
    "~data.vocab_size": "`model.vocab_size` is taken from `data.vocab_size`",
    "~model.nothing": "does not exist",
    (BIG, "cluster.sbatch.nodes=3"): "slurmddp writes itself",
    "+model._recursiv_=false": "`model._recursiv_` is not a special key of Hydra. Did you mean _recursive_",
    "+model.inner={_target_: torch.nn.Linear, _convrt_: all}": (
        "`model.inner._convrt_` is not a special key of Hydra. Did you mean _convert_"
    ),
    "+data._convert_=some": "`data._convert_` is 'some'.*none, partial",
    "+data._recursive_=maybe": "`data._recursive_` is 'maybe'.*true or false",
    "+model._args_=3": "`model._args_` is 3.*a list",
    (BIG, "cluster.sbatch.clusters=other"): (
        "sets clusters: the job would go to another SLURM.*export SLURM_CLUSTERS=NAME"
    ),
    (BIG, 'cluster.sbatch.comment="a\nb"'): "cluster.sbatch",
    (BIG, "cluster.sbatch.exclude=[n1,n2]"): (
        "`cluster.sbatch.exclude` is \\['n1', 'n2'\\] \\(a list\\), but must be a text, a number or true"
    ),
    (BIG, "cluster.env={A-B: 1}"): "`cluster.env` has an entry with the invalid name 'A-B'",
    (BIG, "cluster.env.FLAG=true"): (
        "`cluster.env.FLAG` is True \\(true or false\\), but must be a text.*'cluster.env.FLAG=\"...\"'"
    ),
    (BIG, "cluster.env.X={a: 1}"): "`cluster.env.X` is .*a mapping",
    (BIG, "cluster.env.X=null"): "`cluster.env.X` is empty, but must be a text",
    (BIG, "cluster.setup=[{export A: 1}]"): "`cluster.setup\\[0\\]` is .*a mapping.*but must be a shell line",
}
"""What is typed, one argument or several, and what is said."""


@pytest.mark.parametrize("flags", [[], ["--dry-run"]], ids=["train", "dry run"])
@pytest.mark.parametrize(("typed", "words"), CASES.items(), ids=map(str, CASES))
def test_a_wrong_value_is_refused_before_anything_is_done(
    typed: str | tuple[str, ...],
    words: str,
    flags: list[str],
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(project)
    # Where SLURM is at hand, a mistake of ours must not reach it.
    monkeypatch.setenv("PATH", "/usr/bin/none:/bin/none")
    before = set(project.parent.rglob("*"))
    code = main(["train", *flags, *([typed] if isinstance(typed, str) else typed)])
    output = capsys.readouterr()
    assert code == EXIT_CONFIG, output.err
    assert output.out == ""
    assert output.err.startswith("slurmddp: error: ") and output.err.count("\n") == 1, output.err
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        raise ConfigError(output.err)
    assert set(project.parent.rglob("*")) == before


HOSTILE = [
    "two words", "it's", 'say "hi"', "$HOME `id` $(id)", "; rm -rf /tmp/x", "a\\b", "#!{}%&*", "line\nbreak",
    "-x",
]  # fmt: skip


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


def test_a_value_that_hydra_cannot_read_works_as_the_hint_says(project: Path) -> None:
    for value in ("a;b", "it's;", 'x"y;', "a\\b;", 'a\\"b;', "a;\\"):
        with pytest.raises(ConfigError) as caught:
            compose([f"+model.note={value}"], project)
        (hinted,) = shlex.split(caught.value.hint.partition(": ")[2])
        assert compose([hinted], project)["model"]["note"] == value


def test_a_misspelled_class_of_the_project_is_seen_without_running_it(project: Path) -> None:
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


def test_a_file_named_slurmddp_is_refused_by_its_own_name(project: Path) -> None:
    (project / "train.py").touch()
    (project / "slurmddp").mkdir()  # A clone beside the script hides nothing.
    assert compose(["program.script=train.py"], project)["name"] == "train"
    (project / "slurmddp.py").write_text("print('a script')\n")
    with pytest.raises(ConfigError, match=r"slurmddp\.py hides the package slurmddp.*") as caught:
        compose(["program.script=train.py"], project)
    assert caught.value.hint == "Rename the file."


def test_another_interpreter_may_have_other_packages(project: Path) -> None:
    arguments = ["+cluster=big", "model._target_=only_there.Net"]
    with pytest.raises(ConfigError, match="no module 'only_there'"):
        compose(arguments, project)
    compose([*arguments, "cluster.python=/opt/python"], project)


def test_data_that_will_be_downloaded_need_not_be_there(project: Path) -> None:
    absent = compose(["+data.root=later", "+data.download=true"], project)["data"]
    assert (absent["root"], absent["download"]) == ("later", True)
    (project / "here").mkdir()
    assert compose(["+data.root=here", "+data.inner={path: conf/model}"], project)["data"]["root"] == "here"
    with pytest.raises(ConfigError, match="later"):
        compose(["+data.root=later"], project)


def test_a_data_set_of_the_user_may_read_an_address(project: Path) -> None:
    (project / "remote.py").write_text("class Corpus:\n    def __init__(self, path):\n        pass\n")
    typed = [
        "data._target_=remote.Corpus",
        "data.path=s3://bucket/corpus",
        "model.vocab_size=9",
        "model.context=8",
    ]
    data = compose(typed, project)["data"]
    assert data["path"] == "s3://bucket/corpus"


FILES = [
    ("model/bad", "a: [1\n", "model=bad", r"bad\.yaml"),
    ("model/bad", "- 1\n", "model=bad", "."),
    ("cluster/bad", "time_limit: 24:00:00\n", "+cluster=bad", '"24:00:00"'),
    (
        "cluster/bad",
        "sbatch: {gres: ''}\n",
        "+cluster=bad",
        "`cluster.sbatch.gres` is empty.*null to leave the option out",
    ),
    ("cluster/bad", "python: env FOO=1 python3\n", "+cluster=bad", "a command with arguments.*#!/bin/sh"),
    ("cluster/bad", "partitoin: x\n", "+cluster=bad", "Did you mean cluster.partition"),
    ("cluster/bad", "env: &a [*a]\n", "+cluster=bad", "refers to itself|recursive aliases"),
    ("cluster/a%j", "partition: x\n", "+cluster=a%j", r"a%j names a file.*Rename .*a%j\.yaml"),
    ("experiment/bad", "defaults:\n  - /model: nope\n", "experiment=bad", "nope"),
    ("cluster/bad", "account: ???\n", "+cluster=bad", "`cluster.account` must be given"),
    ("slurmddp", "nodes: [\n", "nodes=1", r"slurmddp\.yaml can't be read"),
    ("slurmddp", "- nodes\n", "nodes=1", "does not hold a YAML mapping"),
    ("slurmddp", "defaults:\n  - model: gtp_small\n", "nodes=1", "Did you mean gpt"),
    ("slurmddp", "defaults: gpt\n", "nodes=1", "not a list"),
    ("slurmddp", "defaults: [gpt]\n", "nodes=1", "no file 'gpt'"),
    ("slurmddp", "hydra:\n  searchpath: [file:///x]\n", "nodes=1", "file:///x.*no folder /x"),
    ("slurmddp", "node: 3\n", "nodes=1", "Did you mean nodes"),
]


@pytest.mark.parametrize(("name", "text", "argument", "words"), FILES)
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


def test_a_file_that_is_no_text_is_refused(project: Path) -> None:
    (project / "conf" / "slurmddp.yaml").write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(ConfigError, match="can't be read"):
        compose([], project)
