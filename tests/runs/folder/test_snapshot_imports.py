"""The agent and its ranks import the modules of a project from the snapshot, however it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT

FINDER = """\
import sys
from importlib.util import spec_from_file_location
from pathlib import Path
MAPPING = {mapping!r}

class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        place = Path(MAPPING.get(name, "/nowhere"))
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.exists():
                return spec_from_file_location(name, file)

def install():
    sys.meta_path.append(Finder)
"""

PROBE = """\
import json, site, subprocess, sys
site.addsitedir(sys.argv[3])
from slurmddp.launchers.agent.preload import enter_project
from slurmddp.runs.folder.layout import RunFolder
enter_project(RunFolder(sys.argv[1]), sys.argv[2])
import importlib
found = [importlib.import_module(name).__file__ for name in sys.argv[4:]]
spawned = subprocess.run(
    [sys.executable, "-c", "import sys, json; sys.path[:] = json.loads(sys.argv[1]); import " + sys.argv[4]
     + f"; print({sys.argv[4]}.__file__)", json.dumps(sys.path)], capture_output=True, text=True)
child = subprocess.run([sys.executable, "-c", f"import {sys.argv[4]} as m; print(m.__file__)"],
    capture_output=True, text=True)
print(json.dumps([found, spawned.stdout.strip(), child.stdout.strip()]))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with modules in several places, and a run folder with a snapshot of them."""
    project = tmp_path / "project"
    for name in ("src/vision/__init__.py", "src/vision/model.py", "lib/odd.py", "top.py"):
        for folder in (project, tmp_path / "run/code"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    (project / "data").mkdir()
    (project / "data/generated.py").touch()
    (tmp_path / "run/code/data").symlink_to(project / "data")
    (tmp_path / "site").mkdir()
    return project


def imported(project: Path, *names: str, pythonpath: str = "") -> tuple[list[str], str, str]:
    """Return the files of modules in the agent, and of the first module in a spawned process and program."""
    site, run = project.parent / "site", project.parent / "run"
    package = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(run), str(project), str(site), *names],
        cwd=project,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [pythonpath, package]))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    main, spawned, child = json.loads(done.stdout)
    return main, spawned, child


@pytest.mark.parametrize("entry", ["src", "{project}/src", "{link}/src"])
def test_an_entry_of_pythonpath_in_the_project_means_the_snapshot(project: Path, entry: str) -> None:
    link = project.parent / "link"
    link.symlink_to(project)
    path = entry.format(project=project, link=link)
    code = project.parent / "run/code"
    model = str(code / "src/vision/model.py")
    main, spawned, child = imported(project, "vision.model", "top", pythonpath=path)
    assert (main, spawned) == ([model, str(code / "top.py")], model)
    assert child == model, "a program that a rank starts imports the snapshot"


def test_an_editable_install_by_a_path_means_the_snapshot(project: Path) -> None:
    (project.parent / "site/__editable__.vision.pth").write_text(f"{project}/src\n")
    model = str(project.parent / "run/code/src/vision/model.py")
    assert imported(project, "vision.model")[:2] == ([model], model)


def test_an_editable_install_by_a_finder_means_the_snapshot(project: Path) -> None:
    mapping = {
        "vision": f"{project}/src/vision",
        "odd": f"{project}/lib/odd",
        "strange": f"{project}/src/vision",
    }
    (project.parent / "site/__editable___vision_finder.py").write_text(FINDER.format(mapping=mapping))
    line = "import __editable___vision_finder; __editable___vision_finder.install()\n"
    (project.parent / "site/__editable__.vision.pth").write_text(line)
    code = project.parent / "run/code"
    main, spawned, _ = imported(project, "vision", "odd", "strange")
    package = str(code / "src/vision/__init__.py")
    assert (main, spawned) == ([package, str(code / "lib/odd.py"), package], package)


def test_folders_that_the_snapshot_does_not_copy_stay_what_they_are(project: Path) -> None:
    entries = f"{project}/data{os.pathsep}{project}/gone"
    assert imported(project, "generated", pythonpath=entries)[0] == [f"{project}/data/generated.py"]
