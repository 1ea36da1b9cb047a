"""`slurmddp bench`: bad words, and a benchmark from the command line to its page and comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.bench.results import read
from slurmddp.cli.main import main
from slurmddp.errors import EXIT_CONFIG, EXIT_USAGE
from support.runs.bench_results import bench_result
from support.runs.train_runs import only_run


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["collective"], EXIT_USAGE, "Did you mean"),
        ([], EXIT_USAGE, "needs an action"),
        (["show"], EXIT_USAGE, "takes 1 run(s) or file(s), but 0 were given"),
        (["compare", "a"], EXIT_USAGE, "takes 2 run(s) or file(s), but 1 were given"),
        (["scaling", "--sizes", "7"], EXIT_CONFIG, "'7', which is not a size"),
        (["collectives", "-n", "1"], EXIT_CONFIG, "needs at least 2 ranks, and there is a single rank"),
        (["scaling", "-n", "2", "--batch", "7"], EXIT_CONFIG, "7 samples can't be shared by 2 ranks"),
    ],
)
def test_bad_words_are_explained(words, code, told, elsewhere, capsys) -> None:
    assert main(["bench", *words]) == code
    assert told in capsys.readouterr().err
    assert not Path("runs").exists(), "nothing was started"


def test_a_benchmark_asks_for_half_an_hour_and_no_requeue_unless_others_are_given(elsewhere, capsys) -> None:
    for words, limit in (([], "00:30:00"), (["time_limit=2:00:00"], "02:00:00")):
        assert main(["bench", "cluster", "+cluster=cpu", "nodes=2", *words, "--dry-run"]) == 0
        shown = capsys.readouterr().out
        assert f"#SBATCH --time={limit}" in shown and "#SBATCH --no-requeue" in shown


def test_two_results_are_compared_and_unlike_ones_refused(tmp_path: Path, capsys) -> None:
    for name in ("a", "b"):
        bench_result("collectives").write(tmp_path / f"{name}.json")
    bench_result("scaling").write(tmp_path / "c.json")
    one, other, unlike = (str(tmp_path / f"{name}.json") for name in "abc")
    assert main(["bench", "compare", one, other]) == 0
    assert "ratio" in capsys.readouterr().out
    assert main(["bench", "compare", one, unlike]) != 0
    assert "bench: collectives and scaling" in capsys.readouterr().err


@pytest.mark.distributed
def test_a_benchmark_is_a_run_whose_result_is_shown(
    tmp_path: Path, monkeypatch, capsys, forked_agents
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--sizes", "4kB,8kB,12kB", "--repetitions", "2", "--warmup", "0"]
    assert main(["bench", "cluster", "nodes=2", "-n", "1", *words]) == 0
    shown = capsys.readouterr().out
    folder = only_run(tmp_path).path
    assert folder.name.startswith("bench-cluster-") and (folder / "bench.html").is_file()
    result = read(folder)
    assert [row["node"].endswith(end) for row, end in zip(result.tables["nodes"], (":0", ":1"), strict=True)]
    assert len(result.tables["links"]) == 1 and result.tables["links"][0]["bytes_per_s"] > 0
    assert "Links between nodes" in shown and "cluster: 2 ranks on 2 nodes" in shown
