"""Each launcher, shipped or of docs/guides/extending.md, starts ranks in their environment, ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.environments.scrub import scrub
from slurmddp.errors import ConfigError
from slurmddp.host import process
from slurmddp.launchers.local.launcher import Launcher, LocalLauncher, build
from slurmddp.plugins import methods
from slurmddp.training.distributon import Distributon
from support import TESTS
from support.own import launcher as own
from support.runs.agent_runs import all_gone, children_of, wait_until

OWN = "support.own.launcher.Behind"
BOTH = pytest.mark.parametrize("launcher", ["local", OWN])

START = """
import json, sys
from slurmddp.launchers.local.launcher import build
launcher, folder, *codes = sys.argv[1:]
ranks = [{"PATH": "/usr/bin:/bin", "RANK": str(rank), "CODE": code} for rank, code in enumerate(codes)]
print(build(launcher).run([sys.executable, "rank.py", "a b", "x='1'"], ranks, folder))
"""
RANK = """
import json, os, pathlib, signal, sys, time
rank, code = os.environ["RANK"], os.environ["CODE"]
if code == "signal":
    for name in ("SIGINT", "SIGTERM", "SIGUSR2"):
        signal.signal(getattr(signal, name), lambda number, frame: sys.exit(75 if number == 12 else 9))
pathlib.Path("." + rank).write_text(json.dumps([sys.argv, dict(os.environ), os.getcwd()]))
pathlib.Path("." + rank).rename("rank-" + rank)
while code in ("signal", "wait"):
    time.sleep(0.01)
sys.exit(int(code))
"""


def start(tmp_path: Path, launcher: str, *codes: str) -> subprocess.Popen[str]:
    (tmp_path / "start.py").write_text(START)
    folder = tmp_path / "the ranks' folder"
    folder.mkdir(exist_ok=True)
    (folder / "rank.py").write_text(RANK)
    return subprocess.Popen(
        [sys.executable, str(tmp_path / "start.py"), launcher, str(folder), *codes],
        env={**scrub(os.environ), "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> int:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return int(output.splitlines()[-1])


@BOTH
def test_d11_a_launcher_starts_each_rank_with_its_environment_in_the_folder(
    tmp_path: Path, launcher: str
) -> None:
    assert result(start(tmp_path, launcher, "0", "0", "0")) == 0
    folder = tmp_path / "the ranks' folder"
    for rank in range(3):
        argv, environ, cwd = json.loads((folder / f"rank-{rank}").read_text())
        assert (argv, cwd) == (["rank.py", "a b", "x='1'"], str(folder))
        assert environ.items() >= {"RANK": str(rank), "CODE": "0"}.items()
        assert "PYTHONPATH" not in environ, "the environment is the whole one"


@BOTH
@pytest.mark.parametrize(("codes", "expected"), [(("75", "0"), 75), (("wait", "3"), 3)])
def test_d11_a_launcher_returns_one_code_and_a_failed_rank_ends_the_others(
    tmp_path: Path, launcher: str, codes: tuple[str, ...], expected: int
) -> None:
    assert result(start(tmp_path, launcher, *codes)) == expected


@BOTH
def test_d11_a_launcher_passes_signals_on_and_leaves_no_rank(tmp_path: Path, launcher: str) -> None:
    process = start(tmp_path, launcher, "signal", "signal")
    wait_until(lambda: len(list(tmp_path.glob("*/rank-*"))) == 2, "the ranks are ready")
    ranks = children_of(process.pid)
    process.send_signal(signal.SIGUSR2)
    assert result(process) == 75
    assert len(ranks) == 2
    wait_until(lambda: all_gone(ranks), "the ranks end")


def test_d11_launch_uses_the_launcher_that_is_given(
    forked_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", forked_python)

    def nice(d: Distributon) -> tuple[int, int]:
        return os.nice(0), d.world_size

    expected = min(os.nice(0) + 1, 19)
    assert Distributon(2, launcher=OWN).launch(nice) == (expected, 2)
    program = (
        "from slurmddp import Distributon\n"
        f"d = Distributon(2, launcher={OWN!r}).launch()\n"
        # Whole lines: the output of the ranks is unbuffered, and this launcher does not relay it.
        "import os\nos.write(1, f'rank {d.rank} of {d.world_size} at {os.nice(0)}\\n'.encode())\n"
    )
    environ = {**scrub(os.environ), "PYTHONPATH": str(TESTS)}
    command = [forked_python, "-c", program]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2 at {expected}" for rank in (0, 1)]


def test_a_number_of_ranks_that_would_use_up_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "usable_cpus", lambda: 1)
    refused = (
        "num_devices=65 is too much: this machine has 1 CPU, for at most 64 ranks. Use num_devices=64 or"
    )
    with pytest.raises(ConfigError, match=refused):
        LocalLauncher().run(["true"], [{"RANK": str(rank)} for rank in range(65)], None)


def test_d11_a_launcher_is_given_as_name_path_class_or_object() -> None:
    assert methods(Launcher) == ["run"]
    assert isinstance(build("local"), LocalLauncher)
    for given in (OWN, own.Behind, own.Behind()):
        assert type(build(given)).__name__ == "Behind"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("locale", "no launcher 'locale'.*Did you mean local.*package.module.Name"),
        ("slurm", "no launcher 'slurm'.*Known: local"),
        ("support.own.launcher.Behin", "has no 'Behin'.*Did you mean Behind"),
        (object(), "no method run"),
    ],
)
def test_d11_another_launcher_is_refused_with_the_alternatives(given, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Distributon(launcher=given)
