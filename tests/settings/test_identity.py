"""The digits of a run's name follow from the computation alone."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmddp.config.same_run import differences_of_runs
from slurmddp.settings.identity import fingerprint
from slurmddp.settings.spec import RUN_DIGITS
from support.runs.projects import job_of, make_project

WHERE = [
    "partition=x", "account=x", "qos=x", "time_limit=5", "mem_gb=3", "cpus_per_node=5",
    "policy.max_restarts=9", "submitter=submitit", "runs_dir=other", "snapshot=false", "launcher=local",
    "cluster.time_limit=7", "cluster.setup=[]", "spare_nodes=1", "elastic=true", "preflight=on",
    "train.memory_save_every=7", "policy.stall_timeout_s=9", "train.log_every=1", "train.eval_every=7",
    "train.save_every=7", "train.keep_last=9", "train.sample_chars=0", "train.workers=2",
    "train.on_spike=rollback", "train.flops=true", "train.precision=32",
]  # fmt: skip

WHAT = [
    "nodes=2", "gpus_per_node=4", "seed=1", "model.width=65", "data.vocab_size=98", "optimizer.lr=0.1",
    "scheduler=null", "train.steps=401", "train.batch_size=17", "loss._partial_=false", "program.x=1",
    "train.global_batch=64", "train.eval_batches=5", "train.clip_norm=2", "train.accumulate=3",
    "train.precision=bf16", "train.ema=0.99", "train.compile=true",
]  # fmt: skip


@pytest.mark.parametrize("override", WHERE)
def test_where_and_how_long_leave_the_name_alone(project: Path, override: str) -> None:
    assert job_of(project, "+cluster=big", override).run_name == job_of(project, "+cluster=big").run_name


def test_new_keys_renamed_no_run(project: Path) -> None:
    """The digits that this configuration had before there were the keys that say how, not what."""
    config = json.dumps(job_of(project, "+cluster=big", "nodes=2").program.config)
    assert fingerprint(json.loads(config.replace(".training.builtin.", ".training."))).startswith("6ebe84ae")


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
        "from slurmddp.config.composition.compose import compose; from slurmddp.config.job import build_job\n"
        "p = Path(sys.argv[1]); c = compose(['nodes=2', 'seed=3'], p)\n"
        "print(build_job(c, project_dir=p).run_name)"
    )
    command = [sys.executable, "-c", code, str(project)]
    names.add(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    assert len(names) == 1
    digits = names.pop().rpartition("-")[2]
    assert job_of(project, "nodes=2", "seed=3", "name=mine").run_name == f"mine-{digits}"


@pytest.mark.parametrize(
    ("keys", "others"),
    [({1: "cat"}, {"1": "cat"}), ({1.5: "cat"}, {"1.5": "cat"}), ({True: "cat"}, {"true": "cat"})],
)
def test_keys_that_are_no_text_are_not_those_of_text(keys: dict[Any, str], others: dict[str, str]) -> None:
    runs = [{"model": {"labels": labels}} for labels in (keys, others)]
    assert differences_of_runs(*runs)
    assert not differences_of_runs(runs[0], runs[0])


def test_numbers_and_texts_may_be_keys_of_one_mapping() -> None:
    labels = {"ignored": 0, 10: "dog", 2: "cat", None: "nothing", False: "no"}
    turned = dict(reversed(labels.items()))
    assert fingerprint({"model": {"labels": labels}}) == fingerprint({"model": {"labels": turned}})
    plain = {"model": {"b": {10: 1, 2: 1}, "a": [{"d": 1, "c": 1}]}}
    as_before = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    assert fingerprint(plain) == hashlib.sha256(as_before.encode()).hexdigest()[:RUN_DIGITS]
