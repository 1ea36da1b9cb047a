"""Tables, times and numbers as the commands print them."""

from __future__ import annotations

import io
import math
import re
import sys

import pytest

from slurmddp.runs.text_format import duration, number, percent, print_table, shorter


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_tables_are_plain_in_a_pipe_and_dressed_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    rows = [("gpt", "failed", "10"), ("[bold]resnet", "running", "9")]
    plain, dressed = io.StringIO(), Terminal()
    for stream in (plain, dressed):
        print_table(
            ("NAME", "STATE", "STEP"), rows, stream, right=frozenset({"STEP"}), styles=["red", "green"]
        )
    assert plain.getvalue() == (
        "NAME          STATE    STEP\ngpt           failed     10\n[bold]resnet  running     9\n"
    )
    assert "\x1b[" in dressed.getvalue()
    assert "[bold]resnet" in dressed.getvalue()


def test_output_over_ssh_looks_as_on_the_terminal_of_the_laptop(monkeypatch, capsys):
    for name, value in {
        "SLURMDDP_OVER_SSH": "terminal",
        "TERM": "xterm",
        "COLUMNS": "20",
        "LINES": "9",
    }.items():
        monkeypatch.setenv(name, value)
    print_table(("NAME", "FOLDER"), [("gpt", "/a/path/longer/than/the/terminal")], sys.stdout)
    printed = capsys.readouterr().out
    assert "\x1b[" in printed
    widths = [len(line) for line in re.sub(r"\x1b\[[0-9;]*m", "", printed).splitlines()]
    assert max(widths) <= 20


def test_a_table_that_stays_whole_is_not_cut_off_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "10")
    stream = Terminal()
    print_table(("ATTEMPT", "TRAINING"), [("0", "2m 00s")], stream, right=frozenset({"TRAINING"}), whole=True)
    assert re.sub(r"\x1b\[\d+m", "", stream.getvalue()) == "ATTEMPT  TRAINING\n0          2m 00s\n"


@pytest.mark.parametrize(
    ("say", "texts"),
    [
        (duration, {None: "-", -3: "0s", 41.4: "41s", 185: "3m 05s", 7620: "2h 07m", 273600: "3d 04h"}),
        (
            percent,
            {
                0.0: "0 %",
                1e-9: "< 1 %",
                0.0051: "1 %",
                0.874: "87 %",
                0.9999: "99 %",
                1.0: "100 %",
                1.001: "100 %",
            },
        ),
        (
            number,
            {None: "-", 0.0: "0.0000", 1.23456: "1.2346", 1e-6: "1.00e-06", 3e9: "3.00e+09", math.nan: "nan"},
        ),
    ],
)
def test_times_shares_and_losses_read_well(say, texts):
    assert {value: say(value) for value in texts} == texts


def test_no_text_of_another_account_commands_the_terminal() -> None:
    stream = io.StringIO()
    print_table(("RUN", "SETTINGS"), [("gpt", "a=\x1b]0;title\x07b\x1b[2J\x9bc")], stream)
    assert stream.getvalue().splitlines()[1] == "gpt  a=bc"


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ("optimizer.lr=0.07704081248969055 seed=1", "optimizer.lr=0.07704 seed=1"),
        ("x=-12.345678901 y=1.23456789e-05", "x=-12.35 y=1.235e-05"),
        ("lr=0.003 'b=[0.33333333333,2]'", "lr=0.003 'b=[0.3333,2]'"),
        ("f=a/2024.12345678/b v=1.2.12345678", "f=a/2024.12345678/b v=1.2.12345678"),
    ],
)
def test_numbers_that_a_search_has_drawn_are_short_in_tables(settings: str, shown: str) -> None:
    assert shorter(settings) == shown
