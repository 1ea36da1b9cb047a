"""`slurmddp list`: one line per run, from any folder."""

from __future__ import annotations

import json

import pytest

from slurmddp.cli.main import main
from slurmddp.errors import EXIT_CONFIG, EXIT_USAGE
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.settings.spec import FUNCTION_CALL
from support.runs.cli_runs import end, start, submit

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_list_shows_every_run(make_run, slurm, capsys):
    first, second = make_run("gpt-00000001"), make_run("resnet-00000002")
    submit(first)
    slurm.set_state("7", "PENDING", reason="Priority")
    submit(second, "8")
    start(second, job_id="8")
    end(second, "finished")
    append_line(second.metrics_file, {"step": 400, "attempt": 0, "time": 1.0, "loss": 1.5})
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines}
    assert lines[0].split() == ["NAME", "STATE", "STEP", "LOSS", "JOB", "AGE", "SETTINGS", "FOLDER"]
    assert "queued" in rows["gpt-00000001"]
    assert "finished" in rows["resnet-00000002"]
    assert "400/400" in rows["resnet-00000002"]
    assert "1.5000" in rows["resnet-00000002"]


def test_list_tells_runs_of_one_name_apart_by_what_was_typed(make_run, slurm, capsys):
    for seed in (1, 2):
        folder = make_run(f"gpt-0000000{seed}")
        typed = f"+cluster=big\nname=gpt\ntrain.steps=400\nseed={seed}\n'data.path=a b'\n"
        folder.overrides_file.write_text(typed)
    other = make_run("mlp-00000003")
    other.overrides_file.write_text(f"optimizer.lr=0.1\ndata.path={'x' * 99}\n")
    for rate in ("1e-3", "1e-4"):
        typed = f'name=fit\n\'program.script="-m a.fit"\'\n\'program.args=["--lr","{rate}","b c"]\'\n'
        make_run(f"fit-{rate}").overrides_file.write_text(typed)
        call = f'\'program.args=["{{run_dir}}","math.pow","[{rate}]"]\'\n'
        make_run(f"pow-{rate}").overrides_file.write_text(f"'program.script=\"{FUNCTION_CALL}\"'\n{call}")
    assert main(["list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    for rate in ("1e-3", "1e-4"):
        assert f"  math.pow({float(rate)})  " in lines[f"pow-{rate}"]
    for seed in (1, 2):
        assert f"seed={seed}" in lines[f"gpt-0000000{seed}"]
        assert "train.steps" not in lines[f"gpt-0000000{seed}"] and "big" not in lines[f"gpt-0000000{seed}"]
    assert "-m a.fit --lr 1e-4 'b c'" in lines["fit-1e-4"]
    assert "optimizer.lr=0.1 data.path=xxx" in lines["mlp-00000003"] and "xxx..." in lines["mlp-00000003"]


def test_list_as_json_is_for_programs(make_run, slurm, capsys):
    submit(make_run())
    assert main(["list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert (row["name"], row["state"], row["job_id"]) == ("gpt-0a1b2c3d", "cancelled", "7")


def test_list_is_limited_and_says_so(make_run, slurm, capsys):
    for number_ in range(3):
        make_run(f"gpt-0000000{number_}")
    assert main(["list", "-n", "2"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    assert "1 more" in err
    assert main(["list", "-n", "2", "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_list_shows_the_runs_of_a_name_or_state_however_old_they_are(make_run, slurm, capsys):
    for number_, outcome in enumerate(("failed", "finished", "failed", "finished")):
        folder = make_run(f"{'gpt' if number_ < 3 else 'mlp'}-0000000{number_}")
        submit(folder)
        start(folder)
        end(folder, outcome, code=int(outcome == "failed"))

    def listed(*flags):
        assert main(["list", "--json", *flags]) == 0
        return sorted(one["name"][-1] for one in json.loads(capsys.readouterr().out)["runs"])

    assert listed("--state", "failed") == ["0", "2"]
    assert listed("--state", "failed", "--state", "finished", "--name", "gpt") == ["0", "1", "2"]
    assert listed("--name", "mlp") == ["3"] and listed("--state", "failed", "--name", "mlp") == []
    assert main(["list", "--state", "failed", "-n", "1"]) == 0
    assert "1 more" in capsys.readouterr().err
    assert main(["list", "--state", "queued"]) == 0
    assert "No run is in this state" in capsys.readouterr().err
    assert main(["list", "--name", "resnet"]) == 0
    assert "No run has a name that begins with resnet." in capsys.readouterr().err
    assert main(["list", "--state", "faild"]) == EXIT_USAGE
    assert "Did you mean failed?" in capsys.readouterr().err


def test_list_without_runs_says_how_to_start_one(slurm, capsys):
    assert main(["list"]) == 0
    assert "slurmddp train" in capsys.readouterr().err
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == []


@pytest.mark.parametrize("given", ["0", "-3"])
def test_less_than_one_run_is_refused_and_not_taken_for_no_runs(make_run, slurm, capsys, given):
    make_run()
    assert main(["list", "-n", given]) == EXIT_CONFIG
    out, err = capsys.readouterr()
    assert out == ""
    assert f"--limit is {given}. Use at least 1, or --all." in err
    assert "no runs yet" not in err
