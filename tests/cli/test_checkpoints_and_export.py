"""`slurmddp checkpoints` and `export` on checkpoints as trainings write them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.files.manifest import FORMAT, TENSORS_FILE, TREE_FILE, _digest
from slurmddp.cli.main import main
from slurmddp.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_NO_RUN
from slurmddp.runs import index
from slurmddp.runs.folder.layout import RunFolder
from support.distributed.checkpoint_files import flip_bit

WEIGHT = torch.arange(12.0).reshape(3, 4)
COUNT = torch.tensor([7])
SMALL = torch.tensor([1, 65535], dtype=torch.uint16)


def write_checkpoint(root, step, objects=None, *, scale=1.0, meta=None):
    """Write what a training would: a model with a type that is stored as bytes, and an optimizer."""
    weight = WEIGHT * scale
    model = OrderedDict(count=COUNT, weight=weight, tied=weight, small=SMALL)
    objects = objects or {"model": model, "optimizer": {"momentum": WEIGHT}}
    return checkpoint.write(
        root, step, {"objects": objects}, meta={"world_size": 4, **(meta or {})}, keep_last=9
    )


def flip_last_bit(path):
    flip_bit(path, path.stat().st_size - 1)


def contents(root):
    return {str(path.relative_to(root)): path.stat().st_mtime_ns for path in sorted(root.rglob("*"))}


@pytest.fixture
def run(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "project" / "runs" / "gpt-0a1b2c3d")
    folder.path.mkdir(parents=True)
    folder.config_file.write_text("name: gpt\n")
    index.remember(folder)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def listed(capsys, *flags):
    code = main(["checkpoints", "gpt", "--json", *flags])
    return code, [(row["step"], row["state"]) for row in json.loads(capsys.readouterr().out)["checkpoints"]]


def test_the_list_names_good_and_bad_and_changes_nothing(run, capsys):
    root = run.checkpoints_dir
    for step in (50, 100, 200, 300, 400):
        write_checkpoint(root, step)
    (root / "step-0000000050").rename(root / "abandoned-step-0000000050")
    (root / "step-0000000100").rename(root / "bad-step-0000000100-2")
    (root / "step-0000000200" / TREE_FILE).unlink()
    flip_last_bit(root / "step-0000000300" / TENSORS_FILE)
    before = contents(root)
    renamed = [(100, "quarantined"), (50, "abandoned")]
    quick = [(400, "complete"), (300, "complete"), (200, "damaged"), *renamed]
    assert listed(capsys) == (EXIT_FAILED, quick)
    thorough = [(400, "verified"), (300, "damaged"), (200, "damaged"), *renamed]
    assert listed(capsys, "--verify") == (EXIT_FAILED, thorough)
    assert contents(root) == before


def test_the_table(run, capsys):
    write_checkpoint(run.checkpoints_dir, 100)
    write_checkpoint(run.checkpoints_dir, 200)
    assert main(["checkpoints", "gpt", "--verify"]) == 0
    header, newest, older = capsys.readouterr().out.splitlines()
    assert header.split() == ["STEP", "STATE", "SIZE", "SAVED", "FOLDER"]
    assert newest.split()[:2] == ["200", "verified"]
    assert "latest" in newest and "latest" not in older
    assert " kB" in newest


def test_the_reason_is_said(run, capsys):
    flip_last_bit(write_checkpoint(run.checkpoints_dir, 7) / TENSORS_FILE)
    assert main(["checkpoints", "gpt", "--verify"]) == EXIT_FAILED
    said = capsys.readouterr().err
    assert "state.safetensors does not match its hash" in said
    assert "A resume skips" in said


def test_one_of_another_version_is_neither_damaged_nor_passed_over(run, capsys):
    write_checkpoint(run.checkpoints_dir, 1)
    manifest = write_checkpoint(run.checkpoints_dir, 2) / "manifest.json"
    content = json.loads(manifest.read_text()) | {"format": FORMAT + 1}
    del content["sha256"]
    manifest.write_text(json.dumps({**content, "sha256": _digest(content)}))
    assert listed(capsys, "--verify") == (EXIT_FAILED, [(2, "other version"), (1, "verified")])
    assert main(["checkpoints", "gpt"]) == EXIT_FAILED
    said = capsys.readouterr().err
    assert f"step-0000000002: it has format {FORMAT + 1}" in said
    assert "A resume skips" not in said
    assert main(["export", "gpt"]) == EXIT_FAILED
    said = capsys.readouterr().err
    assert f"it has format {FORMAT + 1}" in said and "slurmddp that wrote it" in said
    assert not list(Path.cwd().iterdir())
    assert main(["export", "gpt", "--step", "1"]) == 0


def test_a_run_without_any_and_a_run_that_is_none(run, capsys):
    assert main(["checkpoints", "gpt"]) == 0
    assert "no checkpoints yet" in capsys.readouterr().err
    assert main(["export", "gpt"]) == EXIT_FAILED
    assert main(["checkpoints", "nothing"]) == EXIT_NO_RUN


def test_a_folder_of_checkpoints_of_ones_own_script_will_do(run, tmp_path, capsys):
    write_checkpoint(tmp_path / "mine", 3)
    assert main(["checkpoints", str(tmp_path / "mine"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"][0]["step"] == 3
    assert main(["export", str(tmp_path / "mine")]) == 0
    assert Path("mine-step-3.safetensors").is_file()


def test_exported_weights_are_the_models_alone_bit_for_bit(run, capsys):
    write_checkpoint(run.checkpoints_dir, 100)
    write_checkpoint(run.checkpoints_dir, 200, scale=3)
    assert main(["export", "gpt"]) == 0
    output = Path(capsys.readouterr().out.strip())
    assert output == Path("gpt-0a1b2c3d-step-200.safetensors")
    found = load_file(output)
    assert set(found) == {"count", "weight", "tied", "small"}
    assert torch.equal(found["weight"], 3 * WEIGHT)
    assert torch.equal(found["tied"], 3 * WEIGHT)
    assert torch.equal(found["count"], COUNT)
    assert found["small"].dtype == torch.uint16
    assert torch.equal(found["small"], SMALL)
    with safe_open(output, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}, "equal weights of two runs are equal files"
    assert [path.name for path in Path.cwd().iterdir()] == [output.name], "nothing else is left"


def test_a_step_may_be_chosen_and_a_file_is_replaced_only_by_force(run, capsys):
    for step in (1, 2):
        write_checkpoint(run.checkpoints_dir, step, scale=step)
    command = ["export", "gpt", "--step", "1", "--output", "w.safetensors"]
    assert main(command) == 0
    Path("w.safetensors").write_text("mine")
    assert main(command) == EXIT_CONFIG
    assert "exists already" in capsys.readouterr().err
    assert Path("w.safetensors").read_text() == "mine"
    assert main([*command, "--force"]) == 0
    assert torch.equal(load_file("w.safetensors")["weight"], WEIGHT)
    assert main(["export", "gpt", "--step", "5"]) == EXIT_CONFIG
    assert "The steps with a checkpoint: 2, 1." in capsys.readouterr().err


def test_the_best_one_is_marked_and_exported(run, capsys):
    root = run.checkpoints_dir
    for step, accuracy in ((100, 0.5), (200, 0.75), (300, 0.25)):
        write_checkpoint(root, step, meta={"metrics": {"accuracy": accuracy}})
    assert main(["export", "gpt", "--best"]) == EXIT_CONFIG
    assert 'has no `train.best`. Name the metric: --best "min eval_loss"' in capsys.readouterr().err
    assert main(["export", "gpt", "--best", "min accuracy"]) == 0
    assert capsys.readouterr().out == "gpt-0a1b2c3d-step-300.safetensors\n"
    run.config_file.write_text("name: gpt\ntrain:\n  best: max accuracy\n")
    assert main(["export", "gpt", "--best"]) == 0
    assert capsys.readouterr().out == "gpt-0a1b2c3d-step-200.safetensors\n"
    assert main(["checkpoints", "gpt"]) == 0
    assert [(" best " in line, "latest" in line) for line in capsys.readouterr().out.splitlines()[1:]] == [
        (False, True),
        (True, False),
        (False, False),
    ]
    assert main(["checkpoints", "gpt", "--json"]) == 0
    found = [
        (row["best"], row["metrics"]["accuracy"])
        for row in json.loads(capsys.readouterr().out)["checkpoints"]
    ]
    assert found == [(False, 0.25), (True, 0.75), (False, 0.5)]
    assert main(["export", "gpt", "--best", "max f1"]) == EXIT_FAILED
    assert "No undamaged checkpoint" in capsys.readouterr().err


def test_a_damaged_one_is_never_exported(run, capsys):
    write_checkpoint(run.checkpoints_dir, 1)
    flip_last_bit(write_checkpoint(run.checkpoints_dir, 2) / TENSORS_FILE)
    assert main(["export", "gpt", "--step", "2"]) == EXIT_FAILED
    assert "does not match its hash" in capsys.readouterr().err
    assert not list(Path.cwd().iterdir())
    assert main(["export", "gpt"]) == 0
    assert "step-0000000002 is damaged; step-0000000001 was exported" in capsys.readouterr().err
    flip_last_bit(run.checkpoints_dir / "step-0000000001" / TREE_FILE)
    assert main(["export", "gpt", "--force"]) == EXIT_FAILED
    assert "are damaged (2)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "chosen", "found"),
    [
        (("net",), None, {"a"}),
        (("model", "ema"), None, {"a"}),
        (("net", "ema"), "ema", {"a"}),
        (("net", "ema"), None, None),
        (("net",), "nett", None),
        ((), None, None),
    ],
)
def test_which_of_the_saved_objects_it_is(run, capsys, names, chosen, found):
    write_checkpoint(
        run.checkpoints_dir, 1, {**{name: OrderedDict(a=WEIGHT) for name in names}, "progress": {}}
    )
    code = main(["export", "gpt", "--output", "w", *(["--object", chosen] if chosen else [])])
    assert code == (EXIT_CONFIG if found is None else 0)
    assert found is None or set(load_file("w")) == found
    if found is None:
        said = capsys.readouterr().err
        assert "--object" in said and all(name in said for name in names)


@pytest.mark.parametrize(
    ("names", "chosen", "value"),
    [(("a",), [], 2.0), (("a",), ["--object", "model"], 1.0), (("module.a", "n_averaged"), [], 1.0)],
    ids=["averaged", "the others", "an average of other names"],
)
def test_averaged_weights_are_exported_if_there_are_any(run, capsys, names, chosen, value):
    averaged = OrderedDict((name, WEIGHT * 0 + 2) for name in names)
    write_checkpoint(run.checkpoints_dir, 1, {"model": OrderedDict(a=WEIGHT * 0 + 1), "ema": averaged})
    assert main(["export", "gpt", "--output", "w", *chosen]) == 0
    assert {name: tensor.unique().tolist() for name, tensor in load_file("w").items()} == {"a": [value]}
    assert ("averaged weights" in capsys.readouterr().err) is (value == 2.0)


def test_names_lose_what_compiling_put_into_them(run):
    names = ("_orig_mod.a", "_orig_mod.module.b", "c._orig_mod.d")
    write_checkpoint(run.checkpoints_dir, 1, {"model": OrderedDict.fromkeys(names, WEIGHT)})
    assert main(["export", "gpt", "--output", "w"]) == 0
    assert set(load_file("w")) == {"a", "module.b", "c.d"}


def test_an_output_that_can_not_be_written(run, capsys):
    write_checkpoint(run.checkpoints_dir, 1)
    assert main(["export", "gpt", "--output", "no/such/w"]) == EXIT_FAILED
    assert "no/such/w could not be written" in capsys.readouterr().err


def test_neither_command_needs_torch(run):
    write_checkpoint(run.checkpoints_dir, 1)
    code = (
        "import sys; from slurmddp.cli.main import main; "
        "assert main(['checkpoints', 'gpt', '--verify']) == main(['export', 'gpt']) == 0; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
