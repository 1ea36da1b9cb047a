"""Finding a run by its name from any folder."""

from __future__ import annotations

import os

import pytest

from slurmddp.errors import RunNotFoundError
from slurmddp.runs import index
from slurmddp.runs.folder.layout import RunFolder


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    return tmp_path


def make_run(parent, name="gpt-0a1b2c3d", age=0):
    path = parent / name
    path.mkdir(parents=True)
    config = path / "config.yaml"
    config.write_text("name: x\n")
    os.utime(config, (1_700_000_000 - age, 1_700_000_000 - age))
    return RunFolder(path)


def remembered(parent, *names):
    """Create runs and add them to the index; return the first run."""
    runs = [make_run(parent, name) for name in names or ("gpt-0a1b2c3d",)]
    for run in runs:
        index.remember(run)
    return runs[0]


def test_a_remembered_run_is_found_from_any_folder_by_a_prefix_too(home):
    run = remembered(home / "project/runs", "gpt-0a1b2c3d", "resnet-0a1b2c3d")
    assert index.find("gpt-0a1b2c3d").path == run.path
    assert index.find("gp").path == run.path


def test_remembering_twice_changes_nothing(home):
    run = remembered(home / "project/runs", "a-00000001", "b-00000002")
    index.remember(run)
    assert len(index.index_file().read_text().splitlines()) == 2


def test_a_run_whose_folder_is_reached_by_two_paths_is_one_run(home, monkeypatch):
    (home / "disk7/project").mkdir(parents=True)
    (home / "link").symlink_to(home / "disk7")
    monkeypatch.chdir(home / "link/project")
    monkeypatch.setenv("PWD", str(home / "link/project"))
    run = remembered(home / "link/project/runs")
    (home / "alias").symlink_to(run.path)
    for shown in ("link", "disk7", "elsewhere"):
        monkeypatch.chdir(home / shown / ("" if shown == "elsewhere" else "project"))
        monkeypatch.setenv("PWD", str(home / shown / "project"))
        assert [folder.path for folder in index.all_runs()] == [run.path]
        assert index.find("gpt").path == run.path
    assert index.find("../link/project/runs/gpt-0a1b2c3d").path == run.path
    assert index.find("../alias").name == run.name


def test_a_prefix_means_the_runs_of_this_folder_first(home, monkeypatch):
    first = remembered(home / "one/runs", "gpt-00000001")
    other = remembered(home / "two/runs", "gpt-00000002", "gpt-00000003")
    monkeypatch.chdir(home / "one")
    assert index.find("gpt").path == first.path
    make_run(home / "one/runs", "gpt-00000004")
    with pytest.raises(RunNotFoundError, match="matches 2 runs") as caught:
        index.find("gpt")
    assert "gpt-00000002" not in caught.value.message
    monkeypatch.chdir(home)
    with pytest.raises(RunNotFoundError, match="matches 3 runs") as caught:
        index.find("gpt")
    assert str(other.path) in caught.value.message, "the names alone don't show the folders"


def test_a_name_without_its_hash_wins_over_a_longer_name(home):
    first = remembered(home / "project/runs", "exp-0a1b2c3d", "exp2-0a1b2c3d", "exp-b-0a1b2c3d")
    assert index.find("exp").path == first.path
    remembered(home / "project/runs", "exp-00000001")
    with pytest.raises(RunNotFoundError, match=r"matches 2 runs: .*exp-00000001"):
        index.find("exp")


def test_a_whole_name_wins_over_a_longer_one(home):
    short = remembered(home / "project/runs", "gpt", "gpt-large")
    assert index.find("gpt").path == short.path


def test_a_path_works_without_any_index(home):
    run = make_run(home / "copied", "from-afar-00000000")
    assert index.find(str(run.path)).path == run.path
    assert index.find("../copied/from-afar-00000000").path == run.path


def test_a_run_that_is_still_being_written_is_no_run_yet(home, monkeypatch):
    make_run(home / "project/runs", ".gpt-0a1b2c3d.12.ab")
    monkeypatch.chdir(home / "project")
    assert index.all_runs() == []


def test_runs_of_this_folder_are_found_without_the_index_before_what_was_put_aside(home, monkeypatch):
    run = make_run(home / "project/runs")
    aside = make_run(home / "project/runs", "gpt-0a1b2c3d.old-1")
    monkeypatch.chdir(home / "project")
    assert index.find("gpt").path == run.path
    assert index.find("gpt-0a1b2c3d.old-1").path == aside.path


def test_of_two_runs_with_one_name_the_one_here_is_meant(home, monkeypatch):
    first, second = remembered(home / "one/runs"), remembered(home / "two/runs")
    monkeypatch.chdir(home / "one")
    assert index.find("gpt-0a1b2c3d").path == first.path
    monkeypatch.chdir(home)
    with pytest.raises(RunNotFoundError, match="Give the folder") as caught:
        index.find("gpt-0a1b2c3d")
    assert str(second.path) in caught.value.message


def test_a_deleted_run_is_forgotten(home):
    remembered(home / "project/runs").config_file.unlink()
    assert index.all_runs() == []
    with pytest.raises(RunNotFoundError):
        index.find("gpt-0a1b2c3d")


@pytest.mark.parametrize("typed", ["gtp-0a1b2c3d", "gtp", "gpd"])
def test_an_unknown_name_shows_near_ones(home, typed):
    remembered(home / "project/runs")
    with pytest.raises(RunNotFoundError) as caught:
        index.find(typed)
    assert "Did you mean gpt-0a1b2c3d?" in caught.value.hint
    assert caught.value.exit_code == 66


def test_an_unknown_name_unlike_all_others_shows_which_there_are_if_they_are_few(home):
    for number in range(6):
        index.remember(make_run(home / "project/runs", f"gpt-0000000{number}", age=number))
    with pytest.raises(RunNotFoundError) as caught:
        index.find("nosuch")
    assert caught.value.hint == "`slurmddp list` shows all runs."
    index.all_runs()[-1].config_file.unlink()
    with pytest.raises(RunNotFoundError) as caught:
        index.find("nosuch")
    names = ", ".join(f"gpt-0000000{number}" for number in range(5))
    assert caught.value.hint == f"The runs are {names}."


@pytest.mark.parametrize("typed", ["", "/", "..", "~nobody/x", "a\0b", "x" * 5000])
def test_odd_names_are_unknown_names(home, typed):
    remembered(home / "project/runs")
    with pytest.raises(RunNotFoundError):
        index.find(typed)


def test_no_run_at_all_says_how_to_start_one():
    with pytest.raises(RunNotFoundError, match="slurmddp train"):
        index.find("gpt")
    with pytest.raises(RunNotFoundError, match="slurmddp train"):
        index.find(None)


def test_a_private_folder_of_another_account_is_named_so(home, monkeypatch):
    folder = make_run(home / "theirs", "gpt-1")
    folder.config_file.unlink()
    monkeypatch.setattr(index.os, "access", lambda path, mode: path != folder.path)
    with pytest.raises(RunNotFoundError, match=r"belongs to .* who keeps it private.*chmod -R go.rX"):
        index.find(str(folder.path))


def test_the_newest_is_the_one_touched_last(home):
    index.remember(make_run(home / "project/runs", "newer-00000001", age=10))
    older = make_run(home / "project/runs", "older-00000002", age=20)
    index.remember(older)
    assert index.find(None).name == "newer-00000001"
    older.add_event("submitted", job_id="1")
    assert index.find(None).name == "older-00000002"


def test_an_unwritable_home_does_not_stop_a_submission(home, monkeypatch, caplog):
    (home / "state").write_text("a file where the folder should be")
    remembered(home / "project/runs")
    assert "find" in caplog.text
    assert "gpt-0a1b2c3d" in caplog.text


def test_a_damaged_index_is_skipped(home, monkeypatch, caplog):
    run = remembered(home / "project/runs")
    with index.index_file().open("a") as stream:
        stream.write('not json\n3\n{"name": "x"}\n')
    monkeypatch.chdir(home / "project")
    assert index.find("gpt").path == run.path
    assert "damaged" in caplog.text


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOME": "/home/ann"}, "/home/ann/.local/state/slurmddp/runs.jsonl"),
        ({"HOME": "/home/ann", "XDG_STATE_HOME": "/data/state"}, "/data/state/slurmddp/runs.jsonl"),
        ({"HOME": "/home/ann", "XDG_STATE_HOME": "here"}, "/home/ann/.local/state/slurmddp/runs.jsonl"),
    ],
)
def test_where_the_index_lies(environ, expected, monkeypatch):
    monkeypatch.delenv("XDG_STATE_HOME")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert str(index.index_file()) == expected


def test_a_name_is_looked_for_before_the_folders_are(home, monkeypatch):
    """Three look-ups for each of ten thousand runs take seconds on a network file system."""
    looked = []
    really = index.last_touched
    monkeypatch.setattr(index, "last_touched", lambda path: looked.append(path) or really(path))
    remembered(home / "runs", *(f"gpt-{number}0000000abcd" for number in range(5)))
    assert index.find("gpt-3").name == "gpt-30000000abcd"
    assert [path.rpartition("/")[2] for path in looked] == ["gpt-30000000abcd"]
