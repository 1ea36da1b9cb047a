"""The wheel as people install it: it is whole, it needs nothing of the clone, and it trains."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import slurmddp
from support import ROOT


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of this source; the wheel is built from the sdist."""
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        # A file that is deleted but not committed is still listed.
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)

    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)],
        capture_output=True,
        check=True,
    )
    return folder


def test_the_archives_hold_the_licence_and_every_module_and_setting(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    assert wheel.name == f"slurmddp-{slurmddp.__version__}-py3-none-any.whl"
    assert sdist.name == f"slurmddp-{slurmddp.__version__}.tar.gz"

    names = set(zipfile.ZipFile(wheel).namelist())
    licence = f"slurmddp-{slurmddp.__version__}.dist-info/licenses/LICENSE"
    assert zipfile.ZipFile(wheel).read(licence) == (ROOT / "LICENSE").read_bytes()
    sources = [path for folder in ("slurmddp", "hydra_plugins") for path in (ROOT / folder).rglob("*.py")]
    # `slurmddp/conf` and `slurmddp/templates` are links to folders of the top level.
    sources += [
        path for folder in ("conf", "templates") for path in (ROOT / folder).rglob("*") if path.is_file()
    ]
    expected = {path.relative_to(ROOT).as_posix() for path in sources if "__pycache__" not in path.parts}
    expected = {f"slurmddp/{name}" if name.startswith(("conf/", "templates/")) else name for name in expected}
    assert expected - names == set()
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "docs/"))]

    with tarfile.open(sdist) as archive:
        assert f"slurmddp-{slurmddp.__version__}/LICENSE" in archive.getnames()


def test_an_installed_wheel_trains_in_an_environment_of_its_own(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin/python"
    install = [
        sys.executable,
        "-m",
        "pip",
        f"--python={python}",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*install, str(wheel)], check=True)
    # Only the dependencies come from the environment of the tests: `.pth` files are not read in a folder that
    # a `.pth` file adds, so its editable slurmddp stays invisible.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def command(*words: str) -> str:
        return subprocess.run(
            [environment / "bin/slurmddp", *words],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout

    assert command("--version").strip() == f"slurmddp {slurmddp.__version__}"
    module = subprocess.run(
        [python, "-c", "import slurmddp; print(slurmddp.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert Path(module).is_relative_to(environment)
    command("train", "model=gpt_tiny", "train.steps=5", "train.save_every=5", "name=wheel")
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "checkpoints/step-0000000005").is_dir()
    assert "finished" in command("status", "wheel")
