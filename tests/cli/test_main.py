"""The command line around the commands: help, version, exit codes, and every kind of error."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import re
import subprocess
import sys
from types import ModuleType

import pytest

from slurmddp import __version__, errors
from slurmddp.cli import main as cli
from slurmddp.cli.messages import EXIT_CODES_HELP
from slurmddp.errors import EXIT_CODES
from support import ROOT
from support.runs.cli_runs import end, start

TABLE = r"(?<=<!-- {} -->\n).*?(?=<!-- end -->)"


def run(*arguments: str) -> int:
    return cli.main(arguments)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A command of its own: `probe` raises what its module holds as `error`."""
    module = ModuleType("slurmddp.cli.commands.probe", "Probe it.")

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("words", nargs="*")
        parser.add_argument("--loud", action="store_true")
        parser.add_argument("--count", type=int)

    def start(args: argparse.Namespace) -> int:
        module.args = args  # type: ignore[attr-defined]
        if (error := getattr(module, "error", None)) is not None:
            raise error
        return 7

    module.add_arguments, module.run = add_arguments, start  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slurmddp.cli.commands.probe", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", "Probe it.")
    return module


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_help_lists_commands_and_exit_codes(arguments, capsys):
    assert run(*arguments) == 0
    shown = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert re.search(rf"^  {name} ", shown, re.MULTILINE)
    assert EXIT_CODES_HELP in shown


def test_every_exit_code_is_documented():
    constants = [name for name in vars(errors) if name.startswith("EXIT_") and name != "EXIT_CODES"]
    assert [getattr(errors, name) for name in constants] == [*EXIT_CODES]
    documented = {int(code) for code in re.findall(r"^  (\d+)", EXIT_CODES_HELP, re.MULTILINE)}
    assert documented == {*EXIT_CODES}


def exit_codes_for_a_person() -> str:
    rows = [f"| {code} | {row.text} |" for code, row in EXIT_CODES.items()]
    return "\n".join(["| code | meaning |", "|---|---|", *rows, ""])


def exit_codes_of_a_batch_job() -> str:
    rows = [f"| {code} | {row.meaning} | {row.follows} |" for code, row in EXIT_CODES.items() if row.follows]
    return "\n".join(["| code | meaning | what follows |", "|---|---|---|", *rows, ""])


@pytest.mark.parametrize(
    ("page", "mark", "table"),
    [
        ("docs/reference/exit-codes.md", "exit codes of a command", exit_codes_for_a_person),
        ("docs/reference/exit-codes.md", "exit codes of a batch job", exit_codes_of_a_batch_job),
    ],
)
def test_pages_show_the_table_of_exit_codes(page, mark, table):
    """To accept a change, run this test with SLURMDDP_REWRITE_GOLDEN=1 and read the difference."""
    path, place = ROOT / page, re.compile(TABLE.format(mark), re.DOTALL)
    if os.environ.get("SLURMDDP_REWRITE_GOLDEN"):
        path.write_text(place.sub(lambda _: table(), path.read_text()))
    assert place.search(path.read_text())[0] == table()


@pytest.mark.parametrize("name", [*cli.COMMANDS])
def test_each_command_is_there_and_says_what_the_list_says(name, capsys):
    module = importlib.import_module(f"slurmddp.cli.commands.{name}")
    first = (module.__doc__ or "").splitlines()[0].removeprefix(f"`slurmddp {name}`: ")
    assert first.lower() == cli.COMMANDS[name].lower()
    assert run(name, "--help") == 0
    assert f"usage: slurmddp {name}" in capsys.readouterr().out


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"slurmddp {__version__}\n"


def test_arguments_and_flags_come_in_any_order(probe):
    assert run("probe", "a=1", "--loud", "+b=2", "~c", "d=-3") == 7
    assert probe.args.words == ["a=1", "+b=2", "~c", "d=-3"] and probe.args.loud


@pytest.mark.parametrize(
    "name", ["SlurmddpError", "ConfigError", "RunNotFoundError", "SlurmError", "NoProgressError"]
)
def test_an_error_meant_for_people_is_one_paragraph(name, probe, capsys, monkeypatch):
    monkeypatch.delenv(cli.DEBUG_VARIABLE, raising=False)
    kind = getattr(errors, name)
    probe.error = kind("It is wrong.", hint="Do this.")  # type: ignore[attr-defined]
    assert run("probe") == kind.exit_code
    assert capsys.readouterr() == ("", "slurmddp: error: It is wrong. Do this.\n")


@pytest.mark.parametrize("how", ["flag", "flag behind the command", "variable"])
def test_where_an_error_came_from_is_shown_on_request(how, probe, capsys, monkeypatch):
    probe.error = errors.ConfigError("It is wrong.")  # type: ignore[attr-defined]
    monkeypatch.setenv(cli.DEBUG_VARIABLE, "1" if how == "variable" else "0")
    arguments = {"flag": ["--debug", "probe"], "flag behind the command": ["probe", "--debug"]}.get(
        how, ["probe"]
    )
    assert run(*arguments) == errors.EXIT_CONFIG
    shown = capsys.readouterr().err
    assert "Traceback" in shown and shown.endswith("slurmddp: error: It is wrong.\n")


def test_an_unforeseen_error_shows_its_place_and_asks_for_a_report(probe, capsys):
    probe.error = ZeroDivisionError("by zero")  # type: ignore[attr-defined]
    assert run("probe") == errors.EXIT_FAILED
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "ZeroDivisionError: by zero. This is a bug in slurmddp" in shown


def test_ctrl_c_ends_without_a_traceback(probe, capsys):
    probe.error = KeyboardInterrupt()  # type: ignore[attr-defined]
    assert run("probe") == 130
    assert capsys.readouterr() == ("", "\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["probe", "--luod"], "no flag '--luod'. Did you mean --loud"),
        (["probe", "--count", "x"], "Argument --count: invalid int value: 'x'. See `slurmddp probe --help`"),
        (["probe", "--count"], "expected one argument"),
        (["sandbox", "upp"], "has no 'upp'. Did you mean up"),
        (["sandbox", "up", "--nodse", "2"], "Did you mean --nodes"),
        (["status", "a", "b"], "no argument 'b'"),
        (["trian"], "no command 'trian'. Did you mean train"),
        (["train", "--dry"], "no flag '--dry'"),
        (["--hepl"], "Did you mean --help"),
        (
            ["train", "fit.py", "--lr"],
            "flag '--lr'. Run a script with its arguments after it: `slurmddp run [settings] fit.py",
        ),
        (["train", "--nodes=3"], "Type settings without dashes: nodes=3"),
        (["train", "--cluster=a100x8"], "Type settings without dashes: cluster=a100x8"),
        (["train", "--steps", "3"], "no flag '--steps'. Type settings without dashes: train.steps=VALUE"),
        (["train", "--batch-size=8"], "Type settings without dashes: train.batch_size=8"),
        (
            ["run", "--lr", "3", "fit.py"],
            "no flag '--lr'. Flags of the program follow the name of the program.",
        ),
        (["run", "--agian", "fit.py"], "no flag '--agian'. Did you mean --again"),
        (["run", "--launcher", "slurm", "fit.py"], "no flag --launcher"),
        (["resume"], "arguments are required: RUN. See `slurmddp resume --help`"),
        (
            ["bench"],
            "slurmddp bench needs an action: cluster, collectives, strategies, scaling, show, compare.",
        ),
        (["sandbox"], "are required: ACTION (one of up, down, status, env). See"),
        (["completion"], "are required: shell (one of bash, zsh, fish). See"),
        (["+cluster=a100x8"], "slurmddp train +cluster=a100x8"),
    ],
)
def test_a_wrong_command_line_is_one_paragraph(arguments, words, probe, capsys):
    assert run(*arguments) == errors.EXIT_USAGE
    shown = capsys.readouterr()
    assert words in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_the_usual_misspelling_of_the_class_is_answered():
    with pytest.raises(ImportError, match="its class is spelled Distributon"):
        from slurmddp import Distribution  # noqa: F401


def test_a_reader_that_leaves_early_is_no_error():
    code = (
        "import sys; from slurmddp.cli import main\nsys.stdin.readline()\nsys.exit(main.main(['--help']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    if process.stdout is not None:
        process.stdout.close()
    process.stdout = None
    _, complaint = process.communicate(b"\n")
    assert (process.returncode, complaint) == (141, b"")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error(closed, tmp_path):
    line = f'exec "$0" -m slurmddp list {closed}'
    state = {"XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        ["sh", "-c", line, sys.executable],
        cwd=tmp_path,
        env={**os.environ, **state},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "") and "Traceback" not in done.stderr


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "slurmddp", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"slurmddp {__version__}\n"


def test_a_full_disk_is_not_called_a_fault_of_ours(probe, capsys):
    probe.error = OSError(errno.ENOSPC, "No space left on device", "/runs/x")  # type: ignore[attr-defined]
    assert run("probe") == 1
    output = capsys.readouterr().err
    assert output.startswith("slurmddp: error: No space left on device (/runs/x). Free some space")
    assert "Traceback" not in output


@pytest.mark.usefixtures("elsewhere")
def test_a_shell_whose_folder_was_removed_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for command in ("list", "train", "init"):
        assert cli.main([command]) == errors.EXIT_CONFIG
        assert capsys.readouterr().err == (
            "slurmddp: error: The current folder was removed. Change to another one: cd ~\n"
        )
    assert cli.main(["list", "--help"]) == 0


def test_what_a_terminal_can_not_show_ends_no_command(make_run, slurm, monkeypatch):
    folder = make_run()
    start(folder)
    end(folder, "finished")
    folder.rank_log(0, 0).write_text("\u2192 step 7\n", encoding="utf-8")
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="latin-1"))
    assert run("logs", "gpt") == 0
    assert b"[rank 0] \\u2192 step 7\n" in terminal.getvalue()


def test_another_system_than_linux_is_refused_in_one_sentence(probe, capsys, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert run("train") == errors.EXIT_CONFIG
    told = capsys.readouterr().err
    assert "slurmddp runs only on Linux" in told and told.count("\n") == 1
