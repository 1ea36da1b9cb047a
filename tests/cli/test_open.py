"""`slurmddp open`: the path of a run or its report, and the browser where there is a display."""

from __future__ import annotations

import pytest

from slurmddp.cli.main import main

pytestmark = pytest.mark.usefixtures("elsewhere", "slurm")


@pytest.fixture
def opened(monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    pages: list[str] = []
    monkeypatch.setattr("webbrowser.open", pages.append)
    return pages


def test_without_a_display_the_report_is_written_and_named(make_run, opened, capsys):
    folder = make_run()
    assert main(["open", "gpt"]) == 0
    assert capsys.readouterr().out == f"{folder.report_file}\n"
    assert folder.report_file.exists() and opened == []


def test_with_a_display_the_browser_shows_it(make_run, opened, monkeypatch):
    folder = make_run()
    monkeypatch.setenv("DISPLAY", ":0")
    assert main(["open"]) == 0
    assert opened == [folder.report_file.as_uri()]


def test_the_folder_alone_is_printed(make_run, opened, capsys):
    folder = make_run()
    assert main(["open", "gpt", "--folder"]) == 0
    assert capsys.readouterr().out == f"{folder.path}\n"
    assert not folder.report_file.exists()


def test_the_report_of_another_account_is_only_named(make_run, opened, monkeypatch, capsys):
    folder = make_run()
    folder.report_file.write_text("theirs")
    monkeypatch.setattr("slurmddp.control.report.foreign_owner", lambda path: "ada")
    assert main(["open", "gpt"]) == 0
    assert folder.report_file.read_text() == "theirs"
