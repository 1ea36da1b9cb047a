"""`slurmddp train -m hydra/sweeper=optuna`: trials are runs, and the runs are the memory of the search."""

from __future__ import annotations

import builtins
import math
import re

import pytest

from slurmddp.cli.main import main
from slurmddp.config.composition import search_space
from slurmddp.config.composition.sources import DEFAULT
from slurmddp.control import search as trials_of
from slurmddp.control.search import Sampler
from slurmddp.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_STOPPED
from slurmddp.launchers.local import run as local
from slurmddp.runs import sweeps
from slurmddp.runs.report import html
from slurmddp.slurm import client
from support.runs.train_runs import BIG

LR = "optimizer.lr=tag(log,interval(1e-8,1e-1))"
SEARCH = ["train", "-m", "name=gpt", "hydra/sweeper=optuna", LR]
BEST_LR = 1e-3


def distance(lr: float) -> float:
    """Return how many powers of ten a learning rate is away from the best one."""
    return abs(math.log10(lr / BEST_LR))


@pytest.fixture
def trials(here, monkeypatch):
    """Let a local run finish with a loss that depends on its learning rate alone."""

    class Trial(here):
        @staticmethod
        def values(lr):
            return {"eval_loss": distance(lr) / 9, "accuracy": 9 - distance(lr)}

        def __init__(self, job, *rest, **options):
            super().__init__(job, *rest, **options)
            self.lr = job.program.config["optimizer"]["lr"]

        def records(self):
            return [{"step": self.steps, **self.values(self.lr)}]

    monkeypatch.setattr(local, "LocalRun", Trial)
    monkeypatch.setattr(html, "write_report", lambda folder, found: folder.report_file)
    return Trial


def search(*words: str, jobs: int = 5) -> int:
    return main([*SEARCH, f"hydra.sweeper.n_trials={jobs}", *words])


def sweep_of(project) -> sweeps.Sweep:
    (file,) = (project / "runs").glob("*.sweep")
    found = sweeps.find(file.stem)
    assert found is not None
    return found


def rates(project) -> list[float]:
    return [run.config()["optimizer"]["lr"] for run in sweep_of(project).runs]


@pytest.mark.parametrize("seed", range(3))
def test_later_trials_are_better_ones(tmp_path, seed):
    def last_of(sign: int) -> float:
        found = search_space.read([f"hydra.sweeper.sampler.seed={seed}", LR], tmp_path, DEFAULT)
        sampler, distances = Sampler(found), []
        for _ in range(30):
            ((setting,),) = sampler.suggest(1)
            distances.append(distance(float(setting.removeprefix("optimizer.lr="))))
            sampler.learn([sign * distances[-1]])
        return sum(distances[-10:])

    assert last_of(1) < last_of(-1) / 2


def test_trials_of_a_batch_are_chosen_before_a_result_is_known(tmp_path):
    found = search_space.read([LR, "seed=range(1,9)", "model=a,b"], tmp_path, DEFAULT)
    sampler = Sampler(found)
    batch = sampler.suggest(4)
    assert len({tuple(point) for point in batch}) == 4
    assert all(
        [word.partition("=")[0] for word in point] == ["optimizer.lr", "seed", "model"] for point in batch
    )
    sampler.learn([1.0, None, 2.0, 3.0])
    assert Sampler(found).suggest(4) == batch, "the same results give the same trials"


def test_the_same_command_runs_no_trial_twice(project, trials, capsys):
    assert search() == EXIT_FINISHED
    shown, found = capsys.readouterr().out, [distance(lr) for lr in rates(project)]
    assert trials.started == len(set(found)) == 5 and all(1e-8 <= lr <= 1e-1 for lr in rates(project))
    best = sweep_of(project).runs[found.index(min(found))]
    assert re.search(rf"\nbest    {best.name}  optimizer.lr=\S+  eval_loss 0\.", shown)
    name = sweep_of(project).name
    assert shown.endswith(f"report  slurmddp report {name}\nsweep   slurmddp list {name}\n")
    names = [run.name for run in sweep_of(project).runs]

    (project / "my_data.py").touch()
    assert search() == EXIT_FINISHED
    again = capsys.readouterr()
    assert again.err.count("my_data.py has changed since this run. --again runs all trials") == 5
    assert trials.started == 5 and again.out.rpartition("best ")[2] == shown.rpartition("best ")[2]
    assert search(jobs=7) == EXIT_FINISHED
    assert trials.started == 7 and [run.name for run in sweep_of(project).runs][:5] == names
    assert search("hydra.sweeper.sampler.seed=1", jobs=1) == EXIT_FINISHED
    assert trials.started == 8 and len(list((project / "runs").glob("*.sweep"))) == 2


def test_the_direction_and_the_metric_are_also_those_of_the_report(project, trials, capsys):
    asked = ["hydra.sweeper.metric=accuracy", "hydra.sweeper.direction=maximize"]
    assert search(*asked) == EXIT_FINISHED
    found = [distance(lr) for lr in rates(project)]
    best = sweep_of(project).runs[found.index(min(found))].name
    assert f"best    {best} " in capsys.readouterr().out and sweep_of(project).best == "max accuracy"
    assert main(["report", sweep_of(project).name]) == EXIT_FINISHED
    page = sweep_of(project).report_file.read_text()
    assert re.search(rf'<tr class="best">.{{0,200}}{best}', page, flags=re.DOTALL), page
    assert search("hydra.sweeper.metric=accuracy") == EXIT_CONFIG
    assert "It is unknown whether a larger or a smaller accuracy is better" in capsys.readouterr().err
    assert search("hydra.sweeper.metric=acuracy", "hydra.sweeper.direction=maximize") == EXIT_FAILED
    assert "logged no metric acuracy. Did you mean hydra.sweeper.metric=accuracy" in capsys.readouterr().err
    assert trials.started == 5


def test_a_failed_trial_has_no_result_and_three_end_the_search(project, trials, capsys):
    codes = iter([EXIT_FAILED, 0, 0, 0])
    trials.ends = staticmethod(lambda: next(codes))
    assert search(jobs=4) == EXIT_FINISHED
    shown = capsys.readouterr()
    assert (
        len(re.findall(r"^result .* failed$", shown.out, flags=re.M)) == 1
        and trials.started == 4
        and "A rank failed." in shown.err
    )
    trials.ends = staticmethod(lambda: EXIT_FAILED)
    assert search("hydra.sweeper.sampler.seed=7", jobs=9) == EXIT_FAILED
    assert trials.started == 7 and "None of the first 3 trials has a result" in capsys.readouterr().err


@pytest.mark.parametrize("last", [EXIT_STOPPED, EXIT_INTERRUPTED])
def test_a_person_ends_the_search_and_the_same_command_goes_on(project, trials, capsys, last):
    codes = iter([0, last])
    trials.ends = staticmethod(lambda: next(codes))
    assert search() == (EXIT_STOPPED if last == EXIT_STOPPED else EXIT_FAILED)
    assert "the same command continues it" in capsys.readouterr().err
    trials.ends = staticmethod(lambda: 0)
    assert search() == EXIT_FINISHED
    assert trials.started == 2 + 4, "the interrupted trial starts again"


def test_a_failed_trial_that_runs_again_and_another_batch_keep_the_later_trials(project, trials):
    codes = iter([0, 0, EXIT_FAILED, 0, 0])
    trials.ends = staticmethod(lambda: next(codes))
    assert search() == EXIT_FINISHED
    found = rates(project)
    trials.ends = staticmethod(lambda: 0)
    assert search("hydra.sweeper.n_jobs=3") == EXIT_FINISHED
    assert trials.started == 5 + 1 and rates(project) == found, "only the failed one runs again"
    assert main([*SEARCH[:2], LR, *SEARCH[2:4], "hydra.sweeper.n_trials=6"]) == EXIT_FINISHED
    assert trials.started == 5 + 1 + 1, "the order of the words does not count"


def test_fewer_trials_take_none_out_of_the_sweep(project, trials):
    assert search(jobs=4) == EXIT_FINISHED
    found = rates(project)
    assert search(jobs=2) == EXIT_FINISHED
    assert rates(project) == found
    assert search("--again", jobs=2) == EXIT_FINISHED
    assert trials.started == 4 + 2 and rates(project) == found


def test_a_trial_without_a_finite_value_is_one_without_a_result(project, trials, capsys):
    rows = iter([{"eval_loss": 0.5}, {"eval_loss": math.nan}, {}, {"eval_loss": 0.25}])
    trials.values = staticmethod(lambda lr: next(rows))
    assert search(jobs=4) == EXIT_FINISHED
    shown = capsys.readouterr().out
    assert re.findall(r"^result .*loss (\S+)$", shown, flags=re.M) == ["0.5000", "-", "-", "0.2500"]
    assert re.search(r"^best .*eval_loss 0.2500$", shown, flags=re.M)
    trials.values = staticmethod(lambda lr: {"eval_loss": math.inf})
    assert search("hydra.sweeper.sampler.seed=1", jobs=2) == EXIT_FAILED
    assert "None of the first 2 trials has a result" in capsys.readouterr().err


def test_one_of_several_metrics_is_named_and_a_loss_has_a_direction(project, trials, capsys):
    trials.values = staticmethod(lambda lr: {"a": lr, "b": -lr})
    assert search("hydra.sweeper.direction=minimize", jobs=1) == EXIT_CONFIG
    assert "has logged several metrics: a, b. Choose the one to compare" in capsys.readouterr().err
    trials.values = staticmethod(lambda lr: {"loss": 2.0, "eval_loss": 1.0})
    assert search("seed=1", "hydra.sweeper.metric=loss", jobs=1) == EXIT_FINISHED
    assert re.search(r"^best .*  loss 2.0000$", capsys.readouterr().out, flags=re.M)


def test_a_trial_whose_folder_is_removed_has_ended(project, trials, monkeypatch, capsys):
    """`slurmddp rm` may remove a run for which the search waits."""

    def removed(folder, slurm):
        if not (project / "removed").exists():
            folder.path.rename(project / "removed")
        return lambda: folder.path.exists()

    monkeypatch.setattr(trials_of, "end_of", removed)
    assert search(jobs=2) == EXIT_FINISHED
    assert re.search(r"^result  gpt-\w+  removed$", capsys.readouterr().out, flags=re.M)


def test_two_equal_trials_are_one_run(project, trials):
    words = ["train", "-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=8", "hydra.sweeper.n_jobs=4"]
    assert main([*words, "seed=1,2"]) == EXIT_FINISHED
    assert trials.started == 2 and [run.config()["seed"] for run in sweep_of(project).runs] in (
        [1, 2],
        [2, 1],
    )


def test_a_search_ends_when_a_person_cancels_all_runs_that_it_waits_for(
    project, cluster, monkeypatch, capsys
):
    monkeypatch.setattr("slurmddp.control.cancel.SlurmClient", lambda: cluster)

    def cancelled(folder, slurm):
        assert main(["cancel", folder.name if is_one else sweep_of(project).name]) == EXIT_FINISHED
        return lambda: True

    monkeypatch.setattr(trials_of, "end_of", cancelled)
    words = [*BIG, "hydra.sweeper.n_jobs=2"]
    is_one = False
    assert search(*words) == EXIT_STOPPED
    shown = capsys.readouterr()
    assert "Waiting for these runs." in shown.out and shown.out.count("  cancelled\n") == 2
    assert "the same command continues it" in shown.err
    assert len(cluster.submissions) == 1 and len(sweep_of(project).runs) == 2
    assert search(*words) == EXIT_STOPPED
    assert len(cluster.submissions) == 2 and len(sweep_of(project).runs) == 2, "the same trials again"


def test_the_script_that_is_shown_has_the_name_of_the_sweep_and_a_note_is_printed_once(
    project, cluster, monkeypatch, capsys
):
    words = [*BIG, "hydra.searchpath=[file://conf]", "+cluster.env.NCCL_DEBGU=INFO", "hydra.sweeper.n_jobs=2"]
    assert search("--dry-run", *words) == EXIT_FINISHED
    shown = capsys.readouterr()
    assert shown.err.count("note: NCCL_DEBGU") == 1
    monkeypatch.setattr(trials_of, "end_of", lambda folder, slurm: lambda: True)
    search(*words)
    assert f"--job-name={sweep_of(project).name}.1\n" in shown.out


def test_the_first_trials_are_shown_and_nothing_starts(project, trials, capsys):
    three = ["hydra.sweeper.n_jobs=3"]
    assert search("--dry-run", *three) == EXIT_FINISHED
    assert len(re.findall(r"^# \d +gpt-\w{12} +optimizer.lr=", capsys.readouterr().out, flags=re.M)) == 3
    assert search("--cfg", *three) == EXIT_FINISHED
    assert capsys.readouterr().out.count("---\n# gpt-") == 3
    assert trials.started == 0 and not (project / "runs").exists()


REFUSED = {
    "seed=1": "no setting has several values",
    "seed=1,2 seed=3,4": "seed is given twice",
    "seed=1,2 +seed=3": "seed is given twice",
    "seed=1,2 strategy=ddp,nope": "There is no strategy 'nope'",
    "seed=1,interval(2,3)": "has a sweep among its values",
    "seed=1,2 hydra/sweeper/sampler=random": "not a setting of a search",
    "+hydra.sweeper.params.seed=range(1,4)": "not a setting of a search",
    "seed=1,2 hydra.sweeper.n_trials=[1": "needs a whole number of at least 1",
    "seed=interval(1,5)": "must be a whole number",
    "optimizer.lr=interval(5,1)": "the smaller number first. Use interval.LOW,HIGH",
    "optimizer.lr=tag(log,interval(0,1))": "must be above 0",
    "optimizer.lr=tag(lg,interval(1,2))": "has the tag lg",
    "seed=tag(log,range(1,9))": "Only an interval may have a tag",
    "seed=1,2 hydra.sweeper.n_trials=x": "needs a whole number of at least 1",
    "seed=1,2 hydra.sweeper.n_jobs=0": "needs a whole number of at least 1",
    "seed=1,2 hydra.sweeper.n_trails=3": "Did you mean hydra.sweeper.n_trials",
    "seed=1,2 hydra.sweeper.storage=x": "not a setting of a search. Known: direction",
    "seed=1,2 hydra.sweeper.direction=max": "Use minimize or maximize",
    "seed=1,2 +cluster=big ssh=login1": "A search waits for the results of its trials",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_search_that_can_not_be_made_is_refused(project, trials, capsys, words):
    (project / "conf" / "cluster" / "big.yaml").write_text("partition: big\n")
    assert main(["train", "-m", "hydra/sweeper=optuna", *words.split()]) == EXIT_CONFIG
    assert re.search(REFUSED[words], capsys.readouterr().err)
    assert trials.started == 0 and not list(project.glob("runs/*"))


def test_without_optuna_the_error_names_the_package(project, trials, monkeypatch, capsys):
    imported = builtins.__import__

    def absent(name, *rest):
        if name == "optuna":
            raise ModuleNotFoundError("No module named 'optuna'")
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    assert search() == EXIT_CONFIG
    assert "pip install 'slurmddp[optuna]'" in capsys.readouterr().err
    assert client.on_path() is False and trials.started == 0
