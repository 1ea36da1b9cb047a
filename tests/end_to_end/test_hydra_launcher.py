"""`python app.py -m hydra/launcher=slurmddp`: the jobs of a Hydra application are runs of slurmddp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.environments.scrub import scrub
from slurmddp.errors import EXIT_CONFIG
from slurmddp.runs import sweeps
from slurmddp.runs.folder.layout import RunFolder
from support import ROOT
from support.runs.projects import make_project
from support.slurm.slurm_jobs import FakePrograms

APP = """
import hydra
from hydra.core.hydra_config import HydraConfig
from torch import distributed

@hydra.main(version_base="1.3", config_path="settings", config_name="base")
def main(config):
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    print(f"{rank} of {ranks}:", config.rate, config.note, HydraConfig.get().runtime.output_dir, flush=True)
    distributed.barrier()
    distributed.destroy_process_group()

if __name__ == "__main__":
    main()
"""

ONCE = ["hydra.mode=RUN", 'hydra.run.dir="{run_dir}/hydra"']
"""Arguments with which each rank runs the application once."""
FACTS = """
import json, os
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig

@hydra.main(version_base="1.3", config_path="settings", config_name="facts")
def main(config):
    job, place = HydraConfig.get().job, Path(HydraConfig.get().runtime.output_dir)
    facts = {"config": dict(config), "num": job.num, "id": job.id, "name": job.name, "chdir": job.chdir}
    facts |= {"variable": os.environ["FOLD"], "overrides": list(HydraConfig.get().overrides.task)}
    facts |= {"dirname": job.override_dirname, "in_output_dir": Path.cwd() == place}
    facts |= {"written": sorted(path.name for path in place.iterdir())}
    file = Path(hydra.utils.get_original_cwd(), config.by, config.out)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(facts, default=str))

if __name__ == "__main__":
    main()
"""
IN_A_FILE = """
defaults: [_self_, override hydra/launcher: LAUNCHER]
by: LAUNCHER
rate: 1.0
seed: ${hydra:job.num}
out: result_${hydra:job.id}.json
hydra:
  mode: MULTIRUN
  output_subdir: null
  launcher: SETTINGS
  sweeper: {params: {rate: "0.1,0.2"}, max_batch_size: 1}
  sweep: {dir: elsewhere, subdir: "${hydra.job.num}"}
  job: {name: fit, chdir: true, env_set: {FOLD: "fold-${hydra:job.num}"}}
"""
"""A configuration that says itself that the application is a multirun."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project = make_project(tmp_path / "project")
    (project / "settings").mkdir()
    (project / "settings" / "base.yaml").write_text("rate: 1.0\nnote: base\n")
    (project / "settings" / "other.yaml").write_text("rate: 1.0\nnote: other\nhydra: {job: {chdir: true}}\n")
    (project / "app.py").write_text(APP)
    monkeypatch.chdir(project)
    return project


def launch(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        # Hydra finds plugins on the path, where a wheel puts them.
        env={**scrub(os.environ), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=400,
    )


def only_sweep(project: Path) -> sweeps.Sweep:
    (file,) = (project / "runs").glob("*.sweep")
    found = sweeps.find(file.stem)
    assert found is not None
    return found


@pytest.mark.distributed
def test_a_job_of_a_hydra_application_trains_as_ranks_in_one_run_folder(project: Path) -> None:
    words = ["--config-name", "other", "-m", "hydra/launcher=slurmddp", "hydra.launcher.ranks_per_node=2"]
    for attempt in (1, 2):
        done = launch("app.py", *words, "rate=0.5", "note='a, \"b\"'")
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("is finished" in done.stdout) == (attempt == 2), "the same job is never trained twice"
    (run,) = only_sweep(project).runs
    assert run.name.startswith("app-") and len(run.attempts()) == 1
    for rank in range(2):
        assert f'{rank} of 2: 0.5 a, "b" {run.path}/hydra' in run.rank_log(0, rank).read_text()
    assert (run.path / "hydra" / ".hydra" / "overrides.yaml").is_file()


@pytest.mark.distributed
def test_a_job_finds_what_the_basic_launcher_gives_it(project: Path) -> None:
    (project / "facts.py").write_text(FACTS)
    for by, launcher in (("slurmddp", {"ranks_per_node": 1}), ("basic", {})):
        text = IN_A_FILE.replace("LAUNCHER", by).replace("SETTINGS", json.dumps(launcher))
        (project / "settings" / "facts.yaml").write_text(text)
        done = launch("facts.py")
        assert done.returncode == 0, done.stdout + done.stderr
    for number in range(2):
        own, basic = (
            json.loads((project / by / f"result_{number}.json").read_text()) for by in ("slurmddp", "basic")
        )
        assert own["config"].pop("by") != basic["config"].pop("by")
        assert own == basic and own["num"] == number and own["variable"] == f"fold-{number}"


@pytest.mark.parametrize(("note", "is_same"), [("plain", True), ("'job ${hydra:job.num}'", False)])
def test_the_number_of_a_job_tells_runs_apart_only_if_its_configuration_reads_it(
    project: Path, programs: FakePrograms, note: str, is_same: bool
) -> None:
    names = []
    for values in ("1,2", "2,3"):
        words = [f"rate={values}", f"note={note}", "hydra/launcher=slurmddp", "hydra.launcher.cluster=small"]
        done = launch("app.py", "--multi", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        names.append({path.name for path in (project / "runs").glob("app-????????????")})
    assert len(names[0]) == 2 and len(names[1]) == (3 if is_same else 4)


def test_a_rank_that_would_launch_again_refuses(project: Path) -> None:
    words = ["hydra.mode=MULTIRUN", "hydra/launcher=slurmddp", "rate=1,2"]
    done = launch("app.py", *words, SLURMDDP_RUN_DIR="/runs/app-01234567")
    assert done.returncode == EXIT_CONFIG and "hydra.mode=RUN" in done.stderr
    assert "a rank of the run /runs/app-01234567" in done.stderr and not (project / "runs").exists()


def test_jobs_are_submitted_and_the_prompt_comes_back(project: Path, programs: FakePrograms) -> None:
    words = ["hydra/launcher=slurmddp", "hydra.launcher.cluster=small", "hydra.launcher.nodes=2"]
    words += ["+hydra.launcher.policy.max_restarts=9", "hydra.launcher.time_limit=2h"]
    (project / "package").mkdir()
    (project / "package" / "__init__.py").write_text("")
    (project / "app.py").rename(project / "package" / "app.py")
    (project / "settings").rename(project / "package" / "settings")
    done = launch("-m", "package.app", "-m", *words, "rate=range(1,3)", "hydra.verbose=true")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = only_sweep(project).runs
    assert programs.calls("sbatch") == 2 and f"slurmddp list {only_sweep(project).name}" in done.stdout
    for number, run in enumerate(runs, 1):
        script, program = run.script_file.read_text(), run.config()["program"]
        assert "--nodes=2" in script and "--time=02:00:00" in script
        assert program["script"] == "-m package.app" and run.config()["policy"]["max_restarts"] == 9
        assert program["args"] == ["hydra.verbose=true", f"rate={number}", *ONCE]
        assert program["free_args"] == [f"hydra.job.num={number - 1}", f"hydra.job.id={number - 1}"]
        assert RunFolder(run.path).events()[-1]["event"] == "submitted"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["hydra.launcher.cluster=smal"], "no cluster 'smal'.*Did you mean small"),
        (["hydra.launcher.nodes=0"], "`nodes` is 0"),
        (["--config-name", "long"], "long.yaml holds time_limit: 12:00:00 without quotes"),
        (["hydra.launcher.account=1e3"], "command line holds account: 1e3 without quotes"),
        (["+hydra/sweeper=needy"], "needs the result of each job"),
        (
            ["hydra.launcher.cluster=small", "++hydra.sweeper.max_batch_size=1"],
            "max_batch_size=1 starts a batch.*+hydra.launcher.array_parallelism=1",
        ),
        (
            ["hydra.launcher.cluster=small", "++hydra.launcher.ssh=login1"],
            "not submit over ssh.*name ssh=login1",
        ),
    ],
)
def test_what_no_job_can_have_is_refused(project: Path, words: list[str], reason: str) -> None:
    needy = project / "hydra_plugins" / "hydra_optuna_needy"
    needy.mkdir(parents=True)
    (needy / "__init__.py").write_text(
        "from hydra._internal.core_plugins.basic_sweeper import BasicSweeper\n"
        "class Needy(BasicSweeper):\n"
        "    def __init__(self): super().__init__(None)\n"
    )
    (project / "settings" / "hydra" / "sweeper").mkdir(parents=True)
    (project / "settings" / "hydra" / "sweeper" / "needy.yaml").write_text(
        "_target_: hydra_plugins.hydra_optuna_needy.Needy\n"
    )
    (project / "settings" / "long.yaml").write_text("rate: 1.0\nhydra: {launcher: {time_limit: 12:00:00}}\n")
    words = [word if word.startswith("++") else word.lstrip("+") for word in words]
    done = launch("app.py", "-m", *words, "hydra/launcher=slurmddp", "rate=1,2")
    assert done.returncode == EXIT_CONFIG, done.stdout + done.stderr
    first, _, second = reason.partition(".*")
    assert first in done.stderr and second in done.stderr and "Traceback" not in done.stderr
    assert not (project / "runs").exists()
