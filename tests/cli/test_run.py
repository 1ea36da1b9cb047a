"""`slurmddp run`: settings before the program, the program's arguments as typed behind it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slurmddp.cli.commands.run import split
from slurmddp.cli.main import main
from slurmddp.errors import EXIT_CONFIG, EXIT_USAGE
from support.runs.projects import make_project

UNUSUAL = [
    "--lr", "1e-3", "a b", "c;d", "", "{x}", "nodes=7", "--", "-m", "it's", '"q"', "b\\s", "null", "+x",
    "--debug",
]  # fmt: skip
SHOW = """\
import json, os, sys
from pathlib import Path
file = Path(os.environ["SLURMDDP_RUN_DIR"], os.environ["RANK"] + ".json")
page = Path("/proc/self/fd", os.environ["SLURMDDP_HEARTBEAT_FD"])
file.write_text(json.dumps([__name__, page.exists(), sys.argv]))
"""


pytestmark = pytest.mark.usefixtures("forked_agents")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_project(tmp_path / "p")
    (folder / "show.py").write_text(SHOW)
    (folder / "show.py.txt").touch()
    (folder / "show").write_text(f"#!{sys.executable}\n{SHOW}")
    (folder / "show").chmod(0o755)
    (folder / "package").mkdir()
    (folder / "package" / "train.py").write_text(SHOW)
    (folder / "parts").mkdir()
    (folder / "parts" / "__main__.py").touch()
    (folder / "src" / "inside").mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("typed", "own", "program"),
    [
        (["fit.py"], [], ["fit.py"]),
        (["nodes=2", "+cluster=cpu", "--dry-run", "fit.py", "-x"],
         ["nodes=2", "+cluster=cpu", "--dry-run"], ["fit.py", "-x"]),
        (["-n", "4", "fit.py", "-n", "5"], ["-n", "4"], ["fit.py", "-n", "5"]),
        (["--ranks=4", "~train.clip_norm", "-m", "a.b", "c=d"],
         ["--ranks=4", "~train.clip_norm"], ["-m", "a.b", "c=d"]),
        (["seed=1", "--", "a=b.py", "c"], ["seed=1"], ["a=b.py", "c"]),
        (["seed=1", "--help"], ["seed=1", "--help"], []),
    ],
)  # fmt: skip
def test_the_program_begins_at_the_first_word_that_is_no_setting(typed, own, program):
    assert split(typed) == (own, program)


@pytest.mark.parametrize(
    ("program", "file"),
    [
        (["show.py"], "show.py"),
        (["-m", "package.train"], "package/train.py"),
        (["./show"], "./show"),
        (["--", sys.executable, "show.py"], "show.py"),
    ],
)
def test_every_argument_reaches_each_rank_as_typed(project, program, file):
    assert main(["run", "name=shown", "-n", "2", *program, *UNUSUAL, "{run_dir}"]) == 0
    (run,) = (project / "runs").iterdir()
    for rank in range(2):
        name, has_page, (path, *arguments) = json.loads((run / f"{rank}.json").read_text())
        assert (name, has_page, arguments) == ("__main__", True, [*UNUSUAL, str(run)])
        assert path.endswith(file)


def test_arguments_take_the_values_of_own_keys_alone(project: Path) -> None:
    typed = ["--i", "${i}", "${j}", "${seed}", "${oc.env:HOME}", "a\\${i}", "${c.d}"]
    command = ["run", "--multirun", "-n", "1", "+i=range(1,3)", "+c.d=x", "seed=7", "show.py", *typed]
    assert main(command) == 0
    taken = [json.loads(file.read_text())[2][1:] for file in (project / "runs").glob("*/0.json")]
    assert sorted(taken) == [
        ["--i", i, "${j}", "${seed}", "${oc.env:HOME}", f"a\\{i}", "x"] for i in ("1", "2")
    ]


LATER = """\
import os, sys
from pathlib import Path
attempt = os.environ["SLURMDDP_ATTEMPT"]
Path(f"attempt-{attempt}").write_text(" ".join(sys.argv[1:]))
if attempt == "1":
    Path("saved.pt").touch()
sys.exit(0 if attempt == "2" else 75)
"""


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ([], ["--a 0", "--a 1 --resume", "--a 2 --resume"]),
        (["program.checkpoints=saved*.pt"], ["--a 0", "--a 1", "--a 2 --resume"]),
    ],
)
def test_later_attempts_get_further_arguments_once_the_program_has_saved(
    project: Path, settings: list[str], arguments: list[str]
) -> None:
    (project / "later.py").write_text(LATER)
    typed = ["run", "-n", "1", "program.resume_args=--resume", *settings, "later.py", "--a", "{attempt}"]
    assert [main(typed) for _ in range(3)] == [75, 75, 0]
    assert [(project / f"attempt-{number}").read_text() for number in range(3)] == arguments


KILLED_ONCE = """\
import os, random, sys
from pathlib import Path
with open(f"starts-{os.environ['RANK']}", "a") as file:
    print(*sys.argv[1:], random.random(), os.environ["MASTER_PORT"], file=file)
if os.environ["RANK"] == "1" and len(Path("starts-1").read_text().splitlines()) == 1:
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("resumable", [True, False])
def test_a_killed_rank_of_a_script_restarts_in_place_if_the_script_resumes_by_itself(
    project: Path, resumable: bool
) -> None:
    (project / "killed.py").write_text(KILLED_ONCE)
    settings = [f"program.resumable={resumable}".lower(), "program.resume_args=--resume"]
    assert main(["run", "-n", "2", *settings, "killed.py", "--a"]) == (0 if resumable else 1)
    starts = [line.split() for line in (project / "starts-1").read_text().splitlines()]
    assert [start[:-2] for start in starts] == [["--a"], ["--a", "--resume"]][: 1 + resumable]
    assert len({start[-2] for start in starts}) == len(starts), "each start draws anew"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_lines_of_a_failed_rank_are_shown_once_where_its_output_is_shown(
    project: Path, capfd: pytest.CaptureFixture[str], rank: int
) -> None:
    (project / "wrong.py").write_text(f"import os\nassert int(os.environ['RANK']) != {rank}, 'no seed'\n")
    assert main(["run", "-n", "2", "wrong.py"]) == 1
    out, err = capfd.readouterr()
    assert out.count("Traceback") == (rank == 0)
    assert err.count("Traceback") == (rank == 1)
    assert f"Rank {rank} on {os.uname().nodename} ended with exit code 1: AssertionError: no seed" in err
    assert f"rank-{rank}.log" in err


HOOKED = """
import sys
def hook(kind, error, frames):
    print("hooked:", error, file=sys.stderr)
sys.excepthook = hook
raise ValueError("seen")
"""
CHAINED = """
def deep():
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise KeyError("k") from error
deep()
"""
SRC = "import inside\n"
ENDS = {
    "chained.py": (CHAINED, 1, "KeyError: 'k' (chained.py:6 in deep)"),
    "syntax.py": ("x = 1\nx = = 1\n", 1, "SyntaxError: invalid syntax (syntax.py:2)"),
    "hooked.py": (HOOKED, 1, "hooked: seen"),
    "silent.py": (HOOKED.replace("print(", "str(").replace(", file=sys.stderr", ""), 1, "ValueError: seen"),
    "exits.py": ("import sys\nsys.exit(7)\n", 7, "exit code 7"),
    "missing.py": (SRC, 1, "`pip install -e .`"),
}


def test_a_script_that_fails_shows_its_own_frames_as_python_does(project, capfd):
    for name, (text, code, shown) in ENDS.items():
        (project / name).write_text(text)
        assert main(["run", "-n", "1", name]) == 1
        out, err = capfd.readouterr()
        assert shown in out + err, name
        (log,) = (project / "runs").glob(f"{Path(name).stem}*/logs/attempt-0/rank-0.log")
        told = log.read_text()
        assert "runpy" not in told, name
        assert "slurmddp" not in told.replace("set PYTHONPATH", ""), name
        assert json.loads((log.parent / "failure.json").read_text())["exit_code"] == code
        if name in ("chained.py", "syntax.py"):
            alone = subprocess.run([sys.executable, name], cwd=project, capture_output=True, text=True).stderr
            assert told.strip() == alone.replace(f'"{project}/', '"').strip()


def test_a_finished_script_is_started_again_only_with_again(project, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = ["run", "-n", "1", "show.py", "--lr", "1"]
    assert main(command) == 0
    capsys.readouterr()
    assert main(command) == 0
    again = "`slurmddp run --again show.py ...`"
    other = "with other arguments, the script is another run."
    assert f"{again} starts it once more; {other}" in capsys.readouterr().out
    (project / "show.py").write_text((project / "show.py").read_text() + "# edited\n")
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert f"show.py has changed since this run. {again} runs the new code." in shown and other not in shown
    assert len([*(project / "runs").iterdir()]) == 1
    assert main(["run", "--again", *command[1:]]) == 0
    assert main(command) == 0 and "has changed" not in capsys.readouterr().out


def test_the_run_is_named_for_the_program_and_sized_by_ranks(project, capsys):
    assert main(["run", "-n", "3", "--cfg", "-m", "package.train", "--epochs", "2"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["name"], shown["ranks_per_node"]) == ("train", 3)
    assert (shown["program"]["script"], shown["program"]["args"]) == ("-m package.train", ["--epochs", "2"])


@pytest.mark.parametrize(
    ("typed", "code", "message"),
    [
        ([], EXIT_USAGE, "needs a script, a command, or -m with a module: slurmddp run train.py"),
        (["-m"], EXIT_USAGE, "needs a script, a command, or -m with a module"),
        (["show.py", "???"], EXIT_CONFIG, r"argument \?\?\?, which means a missing value"),
        (["program.script=a.py", "show.py"], EXIT_USAGE, "'program.script=a.py' is given as a setting"),
        (["-n", "two", "show.py"], EXIT_CONFIG, "-n needs a whole number of at least 1, not two"),
        (["--dryrun", "show.py"], EXIT_USAGE, "no flag '--dryrun'. Did you mean --dry-run?"),
        (["-n", "0", "show.py"], EXIT_CONFIG, "-n needs a whole number of at least 1, not 0"),
        (["-n", "9000", "show.py"], EXIT_CONFIG, r"nodes=2 and gpus_per_node=2 \(-n 2 without GPUs\)"),
        (["+cluster=a100x8", "-n", "9", "show.py"], EXIT_CONFIG, "-n 9 is more than .*use -n 8 or less"),
        (["+cluster=cpu", "-n", "9000", "show.py"], EXIT_CONFIG, "-n 9000 is too much .*Use -n 256 or less"),
        (["shwo.py"], EXIT_CONFIG, "no script .*shwo.py.*Did you mean show.py"),
        (["show", "x"], EXIT_CONFIG, "no command 'show' on PATH.*write ./show or python show"),
        (["parts"], EXIT_CONFIG, "no command 'parts' on PATH.*write python parts"),
        (["./shwo"], EXIT_CONFIG, "no program .*shwo.*Did you mean show"),
        (["conf/.."], EXIT_CONFIG, "no program.* is a folder: "),
        (["package"], EXIT_CONFIG, "no command.* is a folder"),
        (["-m", "inside.train"], EXIT_CONFIG, r"no module 'inside'.* src/inside is in.*pip install -e \."),
        (["./show.py.txt"], EXIT_CONFIG, "not executable.*chmod .x ./show.py.txt"),
        (["program.checkpoints='{rundir}'", "show.py"], EXIT_CONFIG, "{rundir}, but only {run_dir} has"),
        (["program.checkpoints='a-{attempt}.pt'", "show.py"], EXIT_CONFIG, r"only {run_dir} has a meaning"),
        (["program.resume_args='-f {rundir}'", "show.py"], EXIT_CONFIG, "{rundir}, .*Did you mean {run_dir}"),
        (["-m", "package.trian"], EXIT_CONFIG, "no module package.trian.*Did you mean train"),
        (["-m", "package.qqq"], EXIT_CONFIG, r"no module package.qqq.* Known: train\.$"),
        (["-m", "package"], EXIT_CONFIG, "no module package to run: .*no __main__.py"),
        (["-m", "pakage.train"], EXIT_CONFIG, "no module 'pakage'.*Did you mean package"),
        (["-m", "package/train.py"], EXIT_CONFIG, "not the name of a module.*python -m"),
        (["-m", "seed=1,2"], EXIT_CONFIG, "not the name of a module.*A sweep is `slurmddp run --multirun`"),
    ],
)  # fmt: skip
def test_a_wrong_command_is_refused_and_leaves_nothing(project, capsys, typed, code, message):
    assert main(["run", *typed]) == code
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
    assert not (project / "runs").exists()


ON_NODES = (
    "sh -c 'exec torchrun --nnodes=$WORLD_SIZE --rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT "
    '--nproc-per-node=2 "$@"\' torchrun'
)


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        (
            ["--launcher", "torchrun", "show.py", "a b"],
            "slurmddp run -n 1 -- torchrun --standalone --nproc-per-node=auto show.py 'a b'",
        ),
        (
            ["--launcher=torchrun", "-n", "4", "seed=1", "-m", "package.train"],
            "slurmddp run seed=1 -n 1 -- torchrun --standalone --nproc-per-node=4 -m package.train",
        ),
        (
            ["program.torchrun=true", "nodes=2", "ranks_per_node=2", "show.py"],
            f"slurmddp run nodes=2 -n 1 -- {ON_NODES} show.py",
        ),
    ],
)
def test_the_former_ways_to_torchrun_are_refused_with_the_command_to_type(
    project: Path, typed: list[str], instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *typed]) == EXIT_USAGE
    assert capsys.readouterr().err.endswith(f" Type {instead}\n")
    assert not (project / "runs").exists()
