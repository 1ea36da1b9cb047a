"""A script that starts itself once per device: arguments, output, failures, Ctrl-C; no torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurmddp.errors import ConfigError
from slurmddp.launchers.local.launch import launch_script, of_hydra_job, rank_variables, rerun_command
from slurmddp.launchers.local.launcher import LocalLauncher
from slurmddp.launchers.local.script_run import Relay
from support.runs.agent_runs import all_gone, children_of, runs, wait_until

HEAD = """
import json, os, pathlib, signal, sys, time
from slurmddp.launchers.local.launch import launch_script
from slurmddp.launchers.local.launcher import LocalLauncher
if "RANK" not in os.environ:
    launch_script(int(os.environ["DEVICES"]), LocalLauncher())
rank = int(os.environ["RANK"])
here = pathlib.Path(os.environ["HERE"])
"""
HOSTILE = [
    "a b",
    "",
    "x=1",
    "it's",
    'say "hi"',
    "$HOME",
    "; rm -rf nothing",
    "line\nline",
    "--flag",
    "-",
    "\u00fc*?",
]
NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK")
RECORD = (
    "record = [sys.argv, __name__, sys.flags.optimize, dict(os.environ)]\n"
    "(here / f'argv-{rank}.json').write_text(json.dumps(record))\n"
)
READY = (
    "(here / f'.{rank}').write_text(str(os.getpid())); (here / f'.{rank}').rename(here / f'ready-{rank}')\n"
)
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
WAIT = READY + "while True: time.sleep(0.01)\n"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return tmp_path / "my script.py"


def start(program: Path, body: str, *arguments: str, devices: int = 2) -> subprocess.Popen[str]:
    program.write_text(HEAD + body)
    return start_command(program, str(program), *arguments, devices=devices)


def start_command(program: Path, *arguments: str, devices: int = 2) -> subprocess.Popen[str]:
    environ = dict(os.environ, DEVICES=str(devices), HERE=str(program.parent))
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environ,
        cwd=program.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


@contextmanager
def running(
    program: Path, before: str, wait: str = WAIT, devices: int = 2
) -> Iterator[subprocess.Popen[str]]:
    """Start ranks that do something `before`, and yield their launcher once all are ready."""
    with start(program, before + wait, devices=devices) as process:
        wait_for_ranks(program, devices)
        yield process


def wait_for_ranks(program: Path, count: int) -> None:
    wait_until(lambda: len(list(program.parent.glob("ready-*"))) == count, f"{count} ranks are ready")


def recorded(program: Path, rank: int) -> list:
    return json.loads((program.parent / f"argv-{rank}.json").read_text())


@pytest.mark.parametrize(
    ("options", "argv0", "optimize"),
    [
        (["-O", "my script.py"], "my script.py", 1),
        (["-m", "my_package.train"], "my_package/train.py", 0),
        (["-c", HEAD + RECORD], "-c", 0),
    ],
    ids=["script", "module", "command"],
)
def test_d2_a_program_gets_its_arguments_and_options_intact_and_torchs_variables(
    program: Path, options: list[str], argv0: str, optimize: int
) -> None:
    package = program.parent / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    imports = "from . import __name__ as parent\nassert parent == 'my_package'\n"
    (package / "train.py").write_text(HEAD + RECORD + imports)
    program.write_text(HEAD + RECORD)
    assert finish(start_command(program, *options, *HOSTILE)) == (0, "", "")
    expected = str(program.parent / argv0) if "/" in argv0 else argv0
    meeting_points = set()
    for rank in range(2):
        argv, name, flag, environ = recorded(program, rank)
        assert (argv, name, flag) == ([expected, *HOSTILE], "__main__", optimize)
        assert [environ[one] for one in NUMBERS] == [str(rank), str(rank), "2", "2", "0"]
        meeting_points.add((environ["MASTER_ADDR"], int(environ["MASTER_PORT"])))
    [(address, port)] = meeting_points
    socket.create_server((address, port)).close()


HYDRA = """
import json, os, pathlib, sys, hydra, omegaconf
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from slurmddp.launchers.local.launch import launch_script
from slurmddp.launchers.local.launcher import LocalLauncher

# OmegaConf 2.4 has renamed it; in 2.3 the new name belongs to an older function.
is_renamed = not omegaconf.__version__.startswith("2.3.")
register = OmegaConf.register_resolver if is_renamed else OmegaConf.register_new_resolver
register("pid", os.getpid)
# Hydra 1.4 warns of a base version, Hydra 1.3 warns without one.
base = {"version_base": None} if hydra.__version__.startswith("1.3.") else {}

@hydra.main(**base, config_path=".", config_name="nothing")
def main(cfg):
    if "RANK" not in os.environ:
        launch_script(2, LocalLauncher())
    here, rank = pathlib.Path(os.environ["HERE"]), os.environ["RANK"]
    record = [cfg.note, os.getcwd(), HydraConfig.get().runtime.output_dir, hydra.utils.get_original_cwd()]
    (here / f"argv-{rank}.json").write_text(json.dumps(record))

main()
"""


@pytest.mark.parametrize("options", [["my script.py"], ["-m", "my_app"]], ids=["script", "module"])
def test_d2_a_hydra_app_makes_one_output_folder_for_all_ranks(program: Path, options: list[str]) -> None:
    (program.parent / "app.yaml").write_text("note: nothing\nhydra: {job: {chdir: true}}\n")
    for name in ("my script.py", "my_app.py"):
        (program.parent / name).write_text(HYDRA)
    note = 'a b=c, it\'s "d"'
    words = [f"note='{note.replace(chr(39), chr(92) + chr(39))}'", 'hydra.run.dir="it\'s/${pid:} o"']
    code, _, errors = finish(start_command(program, *options, *words, "--config-name", "app"))
    assert (code, errors) == (0, "")
    [output] = (program.parent / "it's").iterdir()
    for rank in range(2):
        assert recorded(program, rank) == [note, str(output), str(output), str(program.parent)]
    written = (output / ".hydra" / "hydra.yaml").read_text()
    assert written.count("${pid:} o") == 2, "it stays the first process's: run.dir and its override"


def test_d2_a_sweep_of_hydra_is_not_ended_by_its_first_job() -> None:
    config = SimpleNamespace(mode=SimpleNamespace(name="MULTIRUN"))
    hydra_config = SimpleNamespace(initialized=lambda: True, get=lambda: config)
    modules = {"hydra.core.hydra_config": SimpleNamespace(HydraConfig=hydra_config)}
    with pytest.raises(ConfigError, match=r"sweep of Hydra.*launch\(function\)"):
        of_hydra_job(["python", "x.py"], modules)


def test_d2_a_script_that_has_changed_its_folder_is_found_again(program: Path) -> None:
    elsewhere = program.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / program.name).write_text("raise SystemExit('another script of this name')")
    program.write_text("import os\nif 'RANK' not in os.environ: os.chdir('elsewhere')\n" + HEAD + RECORD)
    code, _, errors = finish(start_command(program, program.name, "a b"))
    assert (code, errors) == (0, "")
    assert recorded(program, 1)[0] == [str(program), "a b"]


def test_d2_ranks_learn_their_place(program: Path) -> None:
    body = (
        "from slurmddp.environments.detect import detect\nplace = detect(os.environ)\n"
        "names = 'launch_id', 'environment', 'rank', 'local_rank', 'world_size', 'nodes'\n"
        "values = [getattr(place, name) for name in names]\n"
        "(here / f'argv-{rank}.json').write_text(json.dumps(values))\n"
    )
    launch_ids = []
    for devices in (3, 1):
        assert finish(start(program, body, devices=devices))[0] == 0
        places = [recorded(program, rank) for rank in range(devices)]
        assert [place[1:] for place in places] == [
            ["local", rank, rank, devices, 1] for rank in range(devices)
        ]
        launch_ids += {place[0] for place in places}
    assert len(set(launch_ids)) == len(launch_ids) == 2


def test_t14_output_of_rank_0_is_untouched_and_others_are_named(program: Path) -> None:
    body = (
        "while rank == 1 and not (here / 'ready-0').exists(): time.sleep(0.01)\n"
        "print(f'hello from {rank}', flush=True)\nprint(f'10%\\r90%\\rdone {rank}', file=sys.stderr)\n"
        "sys.stderr.write('no end')\nsys.stderr.flush()\n" + READY
    )
    code, output, errors = finish(start(program, body))
    assert code == 0
    assert sorted(output.splitlines()) == ["[rank 1] hello from 1", "hello from 0"]
    assert "10%\n90%\ndone 0\nno end" in errors, "universal newlines show the carriage returns"
    assert "[rank 1] done 1\n[rank 1] no end\n" in errors


def test_much_output_does_not_block(program: Path) -> None:
    code, output, errors = finish(
        start(program, "print('x' * 1_000_000)\nprint('y' * 1_000_000, file=sys.stderr)\n")
    )
    assert (code, output.count("x"), errors.count("y")) == (0, 2_000_000, 2_000_000)


def test_a_reader_that_leaves_does_not_stop_the_training(program: Path) -> None:
    body = (
        "while rank == 0 and not (here / 'ready-1').exists(): time.sleep(0.01)\n"
        "for _ in range(100 * rank): print('z' * 1000, flush=True)\n" + READY
    )
    process = start(program, body)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.wait(timeout=120) == 0
    wait_for_ranks(program, 2)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((0, 0), 0), ((0, 75), 75), ((75, 75), 75), ((0, 3), 3), ((78, 0), 78), ((79, 75), 79)],
)
def test_exit_codes_become_one(program: Path, codes: tuple[int, int], expected: int) -> None:
    assert finish(start(program, f"sys.exit({codes!r}[rank])"))[0] == expected


def test_d5_an_exception_ends_all_and_is_told_with_rank_host_and_lines(program: Path) -> None:
    body = "if rank == 1:\n    raise ValueError('it is broken')\n" + WAIT
    code, _, errors = finish(start(program, body, devices=3))
    assert code == 1
    told = errors[errors.index("slurmddp: ") :]
    assert told.startswith(
        f"slurmddp: Rank 1 on {os.uname().nodename} ended with exit code 1: "
        "ValueError: it is broken (my script.py:10 in <module>). Its last lines:"
    )
    assert told.endswith("    ValueError: it is broken\n")


def test_ranks_that_fail_together_end_by_themselves(program: Path) -> None:
    body = "file = open(here / f'rows-{rank}', 'w')\nfile.write('all')\n"
    both = "while len([*here.glob('ready-*')]) < 2: time.sleep(0.01)\n"
    fails = "time.sleep(0.1 * rank)\nraise ValueError('the error of both')\n"
    with running(program, body, f"{READY}{both}{fails}") as process:
        assert finish(process)[0] == 1
    assert [(program.parent / f"rows-{rank}").read_text() for rank in range(2)] == ["all", "all"]


def test_d5_a_killed_rank_ends_all_even_deaf_ones(program: Path) -> None:
    with running(program, f"{DEAF}print('alive', file=sys.stderr, flush=True)\n", devices=3) as process:
        ranks = children_of(process.pid)
        os.kill(int((program.parent / "ready-2").read_text()), signal.SIGKILL)
        code, _, errors = finish(process)
    assert code == 128 + signal.SIGKILL
    assert f"Rank 2 on {os.uname().nodename} was killed by SIGKILL" in errors
    assert errors.endswith("    alive\n")
    wait_until(lambda: all_gone(ranks), "all ranks end")


def test_ctrl_c_interrupts_every_rank_once(program: Path) -> None:
    wait = (
        f"    {READY}    while True: time.sleep(0.01)\n"
        "except KeyboardInterrupt:\n    (here / f'interrupted-{rank}').touch()\n    raise\n"
    )
    with running(program, "try:\n", wait) as process:
        process.send_signal(signal.SIGINT)
        code, _, errors = finish(process)
    assert code == 130
    assert len(list(program.parent.glob("interrupted-*"))) == 2
    assert "slurmddp:" not in errors, "nobody failed"


def test_d5_a_second_ctrl_c_kills_deaf_ranks_and_their_children(program: Path) -> None:
    body = (
        "import subprocess\nsignal.signal(signal.SIGINT, lambda *_: (here / f'heard-{rank}').touch())\n"
        "subprocess.Popen(['sleep', '600'])\n"
    )
    with running(program, body) as process:
        left = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: len(list(program.parent.glob("heard-*"))) == 2, "the first Ctrl-C arrives")
        process.send_signal(signal.SIGINT)
        assert finish(process)[0] == 130
    assert len(left) == 4
    wait_until(lambda: not any(runs(one) for one in left), "ranks and their children end")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_signals_that_ranks_take_as_a_stop_keep_their_code(program: Path, sent: signal.Signals) -> None:
    handler = f"signal.signal(signal.{sent.name}, lambda *_: sys.exit(75))\n"
    with running(program, handler) as process:
        process.send_signal(sent)
        assert finish(process)[0] == 75


def test_d5_ranks_die_with_the_first_process(program: Path) -> None:
    with running(program, DEAF) as process:
        ranks = children_of(process.pid)
        process.kill()
        finish(process)
    assert len(ranks) == 2
    wait_until(lambda: not any(runs(one) for one in ranks), "the ranks end")


@pytest.mark.parametrize(
    ("orig_argv", "main_file", "interactive"),
    [
        (["python"], None, True),
        (["python", "-i", "x.py"], "x.py", True),
        (["python", "-"], None, False),
        (["python", "-"], "<stdin>", False),
    ],
)
def test_what_was_typed_into_an_interpreter_is_refused(
    orig_argv: list[str], main_file: str | None, interactive: bool
) -> None:
    with pytest.raises(ConfigError, match="typed into an interpreter"):
        rerun_command(orig_argv, "", main_file, interactive)


def test_a_thread_can_t_launch() -> None:
    raised: list[ConfigError] = []

    def call() -> None:
        try:
            launch_script(2, LocalLauncher())
        except ConfigError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "called in a thread" in raised[0].message


def test_d2_a_meeting_point_of_the_shell_is_not_handed_on() -> None:
    variables = rank_variables({"MASTER_PORT": "1"}, 0, 2, "x", ("127.0.0.1", 9))
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("127.0.0.1", "9")


@pytest.mark.parametrize(
    ("rank", "given", "expected"), [(0, {}, None), (1, {}, "1"), (1, {"PYTHONUNBUFFERED": ""}, "")]
)
def test_what_goes_through_a_pipe_is_not_held_back(
    rank: int, given: dict[str, str], expected: str | None
) -> None:
    assert rank_variables(given, rank, 2, "x", ("", 0)).get("PYTHONUNBUFFERED") == expected


def test_a_line_that_never_ends_is_relayed_in_pieces() -> None:
    """Each look at it would take longer than the last, and the rank waits at a full pipe meanwhile."""
    (source, rank_end), (shown, target) = os.pipe(), os.pipe()
    with open(source, "rb", buffering=0) as stream, open(shown, "rb") as output:
        relay = Relay(stream, target, "[rank 1] ")
        # Without a reader the relay would wait at the full pipe.
        lines: list[bytes] = []
        reader = threading.Thread(target=lambda: lines.extend(output.read().splitlines()))
        reader.start()
        for _ in range(5):
            os.write(rank_end, b"x" * 40_000)
            assert relay.pump()
            assert len(relay._line) <= 64 * 1024
        os.write(rank_end, b"\nlast")
        os.close(rank_end)
        assert not relay.pump()
        relay.close()
        os.close(target)
        reader.join()
    assert all(line.startswith(b"[rank 1] ") for line in lines) and lines[-1] == b"[rank 1] last"
    assert sum(line.count(b"x") for line in lines) == 200_000 and len(lines) >= 3
