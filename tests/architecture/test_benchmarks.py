"""The benchmarks: their measurements and arguments, and that they write results only on request."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys

import pytest

from slurmddp import Distributon
from support import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def peers(benchmark):
    return benchmark("peers")


def program(peers, text):
    """Return a training of one process that runs `text`."""
    return peers.Training("a way", [([sys.executable, "-c", text], {})])


@pytest.mark.parametrize(
    ("named", "gpus", "measured"),
    [(None, 0, "1x2 1x4"), (None, 1, "1x2 1x4 1x1gpu"), (None, 8, "1x2 1x4 1x1gpu"), ("2x2", 1, "2x2")],
)
def test_named_sizes_are_measured_else_those_of_cpus_and_one_gpu(peers, named, gpus, measured):
    asked = named and [peers.Size.read(named)]
    found = peers.sizes(asked, [peers.Size(1, 2), peers.Size(1, 4)], gpus)
    assert " ".join(map(str, found)) == measured


def test_figures_of_a_cpu_are_never_told_as_those_of_a_gpu(peers):
    with pytest.raises(SystemExit, match="torch sees none"):
        peers.sizes([peers.Size.read("1x1gpu")], [], 0)


@pytest.mark.parametrize(("size", "seen"), [("1x4", ""), ("1x1gpu", "0")])
def test_only_a_training_on_the_gpu_sees_it(peers, tmp_path, size, seen):
    training = program(peers, "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    site = peers.Site({**os.environ, "CUDA_VISIBLE_DEVICES": "0"})
    told = peers.measure(training, peers.Size.read(size), tmp_path, site, lambda at: (at / "log").read_text())
    assert told.strip() == seen


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("start", ["--ranks", "2", "1gpu"], "1x2 1x1gpu"),
        ("restart", ["--sizes", "2x2", "1x1gpu"], "2x2 1x1gpu"),
    ],
)
def test_columns_are_named_by_sizes(benchmark, name, words, expected):
    found = vars(benchmark(name).options().parse_args(words))[words[0].removeprefix("--")]
    assert " ".join(map(str, found)) == expected


def test_the_limit_of_the_start_is_for_cpus(benchmark):
    found = {
        "local": {"2": {"to_torchrun": {"slurmddp": 0.4}}, "1gpu": {"to_torchrun": {"slurmddp": 0.7}}},
        "srun": {"4": {"to_torchrun": {"slurmddp": 0.3}}},
    }
    assert benchmark("start").on_cpus(found) == [0.4, 0.3]


def test_what_is_started_at_each_site(peers):
    words = ["python", "plain.py"]
    assert peers.Site({}).command(words) == words
    job = peers.Site({}, hosts=("a1", "a2"), job="7")
    once_on_each = job.command(words)
    assert once_on_each[:5] == ["srun", "--jobid=7", "--overlap", "--nodes=2", "--ntasks=2"]
    assert "--overcommit" not in once_on_each
    assert once_on_each[-2:] == words
    assert job.command(words, tasks=4)[3:6] == ["--nodes=2", "--ntasks=4", "--overcommit"]


def test_a_training_is_read_when_it_has_ended_and_told_when_it_fails(peers, tmp_path):
    site, size = peers.Site(dict(os.environ)), peers.Size(1, 2)
    stamp = "import os; open(os.environ['BENCHMARK_STAMPS'] + '/0', 'w').write('7')"
    training = program(peers, stamp)
    assert peers.measure(training, size, tmp_path, site, lambda at: float((at / "0").read_text())) == 7
    with pytest.raises(SystemExit, match=r"a way, 1x2: it ended with \[3\]\n--- log\nbroken"):
        peers.measure(program(peers, "print('broken'); raise SystemExit(3)"), size, tmp_path, site, float)


def test_what_hangs_is_ended_with_what_it_has_put_into_another_session(peers, tmp_path, monkeypatch):
    """As torchrun does with its ranks."""
    monkeypatch.setattr(peers, "LIMIT_S", 3)
    text = f"""
import signal, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
open({str(tmp_path / "rank")!r}, "w").write(str(rank.pid))
signal.signal(signal.SIGTERM, lambda *_: (rank.terminate(), rank.wait(), sys.exit(1)))
signal.pause()
"""
    with pytest.raises(SystemExit, match="timed out"):
        peers.measure(program(peers, text), peers.Size(1, 1), tmp_path, peers.Site(dict(os.environ)), float)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "rank").read_text()), 0)


def test_a_workplace_goes_away_after_a_signal_too(tmp_path):
    text = f"""
import os, signal, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from peers import workplace
with workplace("test", {{"plain.py": "pass"}}) as folder:
    print(folder, (folder / "plain.py").read_text(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
"""
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", text], env=environ, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.split()[1:]) == (1, ["pass"])
    assert list(tmp_path.iterdir()) == []


def test_turns_are_taken_and_the_first_round_does_not_count(benchmark):
    record, asked = benchmark("record"), []

    def measure(name):
        asked.append(name)
        return float(len(asked))

    assert record.in_turn(("a", "b"), 2, measure) == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert asked == ["a", "b"] * 3


def test_a_ratio_is_taken_round_by_round(benchmark):
    # Medians of each (2 and 4) would say 0.5.
    assert benchmark("record").ratio([1.0, 2.0, 30.0], [4.0, 2.0, 10.0]) == 1.0


def test_a_step_is_compared_with_the_hand_written_one_of_its_round(benchmark):
    wall = {"by hand": [1.0, 2.0, 4.0], "slurmddp": [1.1, 2.0, 4.8], "again": [1.0, 2.0, 4.0]}
    cpu = {"by hand": [0.5, 0.5, 0.75], "slurmddp": [0.5, 0.625, 1.0], "again": [0.5, 0.5, 0.75]}
    step = benchmark("step")
    found = step.ratios({name: [*zip(wall[name], cpu[name], strict=True)] for name in wall})
    assert found == {
        "slurmddp": {"median": 1.1, "low": 1.0, "high": 1.2, "cpu": 1.0625, "cpu_us": 125000.0},
        "again": {"median": 1.0, "low": 1.0, "high": 1.0, "cpu": 1.0, "cpu_us": 0.0},
    }
    assert step.missed(found["slurmddp"]) == ["1.0625 of the hand-written step by CPU time"]
    assert step.missed(found["again"]) == []


def test_ratios_are_printed_as_sentences(benchmark, monkeypatch, tmp_path, capsys):
    restart, stall = benchmark("restart"), benchmark("checkpoint_stall")
    taken = {"torchrun": 4.0, "torchrun default": 8.0, "slurmddp": 0.5}
    monkeypatch.setattr(restart, "seconds", lambda way, *_: taken[way])
    found = restart.measure_size(restart.Size(1, 2), tmp_path, 1)
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == "  slurmddp takes 0.125 of the time of torchrun and 0.0625 of the time of torchrun default"
    assert found["slurmddp_to"] == {"torchrun": 0.125, "torchrun default": 0.0625}
    ratios = dict.fromkeys(
        ["stall of async_save", "steps beside it", "steps beside async_save", *stall.LIMITS], 0.5
    )
    size = {"memory": {"share": 0.5}, "bytes": 1, "table": {}, "ratios": {"slurmddp": ratios}}
    assert "  slurmddp: stall of async_save 0.5, steps beside it 0.5," in "\n".join(
        stall.lines({"1 MB": size})
    )


def test_the_trace_of_faults_follows_from_the_seed_alone(benchmark):
    goodput = benchmark("goodput")
    faults = goodput.trace(3, 1200)
    assert faults == goodput.trace(3, 1200) != goodput.trace(4, 1200)
    assert sorted(fault.kind for fault in faults) == sorted(goodput.KINDS)
    steps = [fault.step for fault in faults]
    assert min(after - step for step, after in zip([0, *steps], [*steps, 1200], strict=True)) >= 50


def test_the_loss_of_a_fault_is_its_time_without_that_of_slurm(benchmark):
    """Ten steps of 1 s each. A fault after step 4 costs 6 s, of which 2 s are SLURM's, and repeats step 4."""
    goodput = benchmark("goodput")
    plain = goodput.Watched(0.0, [(step, 5.0 + step) for step in range(1, 11)], [(0.0, 3.0)])
    before = [(step, 5.0 + step) for step in range(1, 5)]
    after = [(step, 5.0 + step + 6) for step in range(5, 11)]
    fault = goodput.Fault("kill-rank", 4, 0)
    waits = [(0.0, 3.0), (10.0, 12.0)]
    faulty = goodput.Watched(0.0, [*before, (4, 14.5), *after], waits, [(fault, 4, 9.0)])
    found = goodput.figures(plain, faulty)
    assert (found["time_without_s"], found["time_s"], found["lost_s"], found["slurm_s"]) == (12, 16, 4, 5)
    assert (found["steps_twice"], found["last_step"]) == (1, 10)
    assert [one["lost_s"] for one in found["faults"]] == [4]


@pytest.mark.parametrize(
    ("ours", "peer", "held"),
    [
        ({"ratio": 1.04, "lost_s": 2}, {"lost_s": 10}, (True, True)),
        ({"ratio": 1.06, "lost_s": 3}, {"lost_s": 10}, (False, False)),
        ({"ratio": 1.04, "lost_s": 2}, {"lost_s": 10, "failed": "it stopped at step 3"}, (True, False)),
        ({"failed": "it stopped at step 3"}, {"lost_s": 10}, (False, False)),
    ],
)
def test_a_training_that_did_not_end_holds_no_goal_and_is_no_best_peer(benchmark, ours, peer, held):
    verdict = benchmark("goodput").verdict({"slurmddp": ours, "torchrun": peer})
    assert (verdict["held"], verdict["held_to_peer"]) == held


def test_nothing_is_written_unless_a_file_is_named(benchmark, tmp_path, monkeypatch):
    record, file = benchmark("record"), tmp_path / "found.json"
    monkeypatch.chdir(tmp_path)
    assert record.parser("about").parse_args([]).output is None
    record.keep(None, {"held": True})
    assert list(tmp_path.iterdir()) == []
    record.keep(record.parser("about").parse_args(["--output", "found.json"]).output, {"held": True})
    told = json.loads(file.read_text())
    assert told["held"] is True
    assert {"command", "date", "torch", "cpus", "load_average"} <= set(told)


@pytest.mark.parametrize("file", [".", "no/such/folder.json"])
def test_a_file_that_cannot_be_is_refused_before_anything_is_measured(benchmark, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        benchmark("record").parser("about").parse_args(["--output", file])


def test_every_benchmark_keeps_results_in_the_same_way():
    texts = {file.name: file.read_text() for file in sorted(BENCHMARKS.glob("*.py"))}
    apart = {"peers.py", "record.py", "savers.py"}
    assert [name for name, text in texts.items() if "parser(__doc__" not in text] == sorted(apart)
    assert [name for name, text in texts.items() if '"results"' in text] == []


def test_benchmarks_use_methods_that_distributon_has():
    texts = {file.name: file.read_text() for file in sorted(BENCHMARKS.glob("*.py"))}
    used = [(name, method) for name, text in texts.items() for method in re.findall(r"\bd\.([a-z]\w+)", text)]
    assert len(used) > 20
    assert [(name, method) for name, method in used if not hasattr(Distributon, method)] == []


def test_an_all_reduce_is_judged_by_its_size(benchmark):
    times = {"gloo": [10.0], "shm": [2.0], "MPICH": [4.0], "Open MPI": [1.0]}
    names = {
        case: [(round(found, 3), limit) for _, found, limit in benchmark("all_reduce").verdicts(case, times)]
        for case in ("4096", "1048576", "small")
    }
    assert names == {"4096": [(0.2, 0.1)], "1048576": [(0.2, 0.5), (2.0, 1.2)], "small": [(0.2, 1.0)]}


@pytest.mark.parametrize(
    ("enqueue", "copy", "matrices", "held"),
    [(90e-6, 1.2, 1.05, [True, True, True]), (110e-6, 1.3, 1.2, [False, False, False])],
)
def test_remote_tensors_are_judged_by_their_three_promises(benchmark, enqueue, copy, matrices, held):
    times = {"enqueue": [enqueue], "copy": [copy], "socket": [1.0], "matrices": [matrices]}
    found = benchmark("remote_tensors").verdicts({**times, "local matrices": [1.0]})
    assert [ok for _, ok in found] == held


def test_staleness_compares_losses_after_equal_seconds_and_under_equal_delays(benchmark):
    staleness = benchmark("staleness")
    course = staleness.Course([1.0, 2.0, 3.0], [9.0, 8.0, 7.0])
    assert [course.loss_at(second) for second in (1.5, 2.0, 99.0)] == [9.0, 8.0, 7.0]
    assert staleness.delays("one rank", 0, 3) == [0.0] * 3 != staleness.delays("one rank", 2, 3)
    drawn = [staleness.delays("any rank", rank, 200) for rank in (0, 1, 1)]
    assert drawn[0] != drawn[1] == drawn[2] and 0 < drawn[1].count(0.06) < 200
