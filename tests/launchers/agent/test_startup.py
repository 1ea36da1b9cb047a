"""The `sitecustomize` of a person's program: imports find the snapshot, and nothing of it stays behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurmddp.environments import names
from slurmddp.host.heartbeat_page import _NAME, STACKS_SIGNAL, HeartbeatPage
from slurmddp.launchers.agent import user_program
from slurmddp.launchers.agent.startup import sitecustomize
from slurmddp.runs.folder.layout import RunFolder

STARTUP = Path(sitecustomize.__file__).parent
SHOW = """
import json, os, sys
print(json.dumps({
    "path": sys.path, "argv": sys.argv, "modules": sorted(sys.modules),
    "finders": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
    "variables": [os.environ.get(name) for name in ("PYTHONPATH", "SLURMDDP_SNAPSHOT")],
}))
"""
BUSY = """
import ctypes, hashlib, sys, threading, types
def release():
    ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)  # PR_SET_NAME
    begun.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # Work without the interpreter lock.
    print("released")
begun = threading.Event()
threading.Thread(target=release, daemon=True).start()
begun.wait()
sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a package in `src`, and a run of it whose snapshot has other code."""
    project = tmp_path / "project"
    for place, text in ((project, "of now"), (project / "runs" / "x" / "code", "of the snapshot")):
        (place / "src" / "pack").mkdir(parents=True)
        (place / "src" / "pack" / "__init__.py").write_text(f"code = {text!r}\n")
        (place / "main.py").write_text("import pack, sys\nprint(pack.code, sys.path[0], __spec__.origin)\n")
        (place / "show.py").write_text(SHOW)
    return project


def start(project: Path, *words: str, **environ: str) -> str:
    """Start Python as an agent does; return what it prints."""
    entries = [str(STARTUP), *filter(None, [environ.pop("PYTHONPATH", "")])]
    values = {**os.environ, "SLURMDDP_RUN_DIR": str(project / "runs" / "x"), "SLURMDDP_SNAPSHOT": "1"}
    values |= environ
    values["PYTHONPATH"] = os.pathsep.join(entries)
    done = subprocess.run(
        [sys.executable, "-u", *words], cwd=project, env=values, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_module_and_its_packages_come_from_the_snapshot(project: Path) -> None:
    code = project / "runs" / "x" / "code"
    printed = start(project, "-m", "main", PYTHONPATH=str(project / "src"))
    assert printed == f"of the snapshot {code} {code / 'main.py'}\n"


def test_a_command_imports_the_files_of_the_project(project: Path) -> None:
    printed = start(project, "-m", "main", PYTHONPATH=str(project / "src"), SLURMDDP_SNAPSHOT="0")
    assert printed == f"of now {project} {project / 'main.py'}\n"


@pytest.mark.parametrize("words", [["-m", "show", "a"], ["show.py", "a"]])
def test_nothing_of_it_stays(project: Path, words: list[str]) -> None:
    seen = json.loads(start(project, *words))
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    plain = subprocess.run(
        [sys.executable, "-u", *words], cwd=project, env=environ, capture_output=True, text=True, check=True
    )
    expected = json.loads(plain.stdout)
    assert set(seen.pop("modules")) - set(expected.pop("modules")) <= {"faulthandler", "__future__"}
    if words[0] == "-m":
        code = str(project / "runs" / "x" / "code")
        expected["path"][0], expected["argv"][0] = code, f"{code}/show.py"
    assert seen == expected


def test_the_sitecustomize_of_the_site_follows(project: Path, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins\nbuiltins.here = 'of the site'\n")
    words = "-c", "import sitecustomize; print(here, sitecustomize.__file__)"
    printed = start(project, *words, PYTHONPATH=str(tmp_path / "site"))
    assert printed == f"of the site {tmp_path / 'site' / 'sitecustomize.py'}\n"


def test_editable_installs_find_the_snapshot(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = project / "runs" / "x" / "code"
    finder = type(sys)("__editable___pack_finder")
    finder.MAPPING = {"pack": str(project / "src" / "pack"), "other": "/elsewhere"}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, finder.__name__, finder)
    monkeypatch.setattr(sys, "path", [str(project / "src"), "/elsewhere", str(project / "missing")])
    sitecustomize.import_from_copy(str(project), str(code))
    assert {"pack": str(code / "src" / "pack"), "other": "/elsewhere"} == finder.MAPPING  # type: ignore[attr-defined]
    assert sys.path == [str(code / "src"), "/elsewhere", str(project / "missing"), str(code / "src")]


def test_the_agent_gets_the_stacks_of_the_program(project: Path) -> None:
    page = HeartbeatPage.create()
    os.set_inheritable(page.descriptor, True)
    program = f"import os, time\nos.kill(os.getpid(), {int(STACKS_SIGNAL)})\ntime.sleep(0)"
    values = {**os.environ, names.HEARTBEAT_VARIABLE: str(page.descriptor), "PYTHONPATH": str(STARTUP)}
    command = [sys.executable, "-c", program]
    subprocess.run(command, env=values, pass_fds=[page.descriptor], cwd=project, check=True, timeout=240)
    assert 'File "<string>", line 2 in <module>' in page.stacks(0, page.stacks_bytes())
    page.close()


def test_a_program_ends_after_the_threads_of_gloo(project: Path) -> None:
    """A thread that takes the interpreter lock during the shutdown would abort the process."""
    (project / "busy.py").write_text(BUSY)
    assert start(project, "busy.py") == "released\n"


@pytest.mark.parametrize("command", ["python", "sh"])
def test_only_a_command_that_starts_this_python_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.config_file.write_text(yaml.safe_dump({"program": {"script": command, "args": ["app.pyz"]}}))
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *words: started.extend(words))
    monkeypatch.setattr(user_program, "_reset_signals", lambda: None)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", "mine")
    user_program.become(str(run.path))
    _, words, environ = started
    entries = [str(STARTUP), "mine"] if command == "python" else ["mine"]
    assert (words, environ["PYTHONPATH"]) == ([command, "app.pyz"], os.pathsep.join(entries))
    assert environ.get("SLURMDDP_SNAPSHOT") == ("0" if command == "python" else None)


def test_it_names_what_other_modules_define() -> None:
    assert sitecustomize.RUN_DIR_VARIABLE == names.RUN_DIR_VARIABLE
    assert sitecustomize.SNAPSHOT_VARIABLE == names.SNAPSHOT_VARIABLE
    assert sitecustomize.HEARTBEAT_VARIABLE == names.HEARTBEAT_VARIABLE
    assert RunFolder("x").code_dir.name == sitecustomize.CODE_FOLDER
    assert sitecustomize.PAGE_NAME == _NAME
