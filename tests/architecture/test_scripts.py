"""Each script is executed, compiled or parsed by a test; each template is rendered and then parsed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from slurmddp.bench.page import write_bench_page
from slurmddp.runs.report.card import card_html, read_card
from slurmddp.runs.report.html import write_report
from slurmddp.runs.report.sweep import write_sweep_report
from slurmddp.runs.status.run_status import status
from slurmddp.sandbox import conf, plan
from slurmddp.slurm.script import render, render_array
from slurmddp.templates import template
from support import ROOT, TESTS
from support.runs.bench_results import bench_result
from support.runs.run_events import FAILED, make_folder, write
from support.slurm.slurm_jobs import make_job

FOLDERS = [".ci", "benchmarks", "conf", "docs", "examples", "templates", "tests"]
"""Folders with scripts. The tests import all modules of slurmddp and of the tests."""
PYTHON, SHELL, TEMPLATE = "python", "shell", "template"


def kind_of(path: Path) -> str | None:
    """Return the language of a script or template; None for another file."""
    if path.suffix == ".j2":
        return TEMPLATE
    if path.suffix == ".py":
        return PYTHON if "tests" not in path.relative_to(ROOT).parts else None
    with path.open("rb") as stream:
        first = stream.readline().decode(errors="replace")
    if path.suffix in (".sh", ".sbatch") or (first.startswith("#!") and first.rstrip().endswith("sh")):
        return SHELL
    if first.startswith("#!") and first.rstrip().endswith("python3"):
        return PYTHON
    return "unknown" if first.startswith("#!") else None


FILES = {
    path: kind
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    # The run of an example has a copy of the code.
    if not (folder == "examples" and "runs" in path.parts)
    if path.is_file() and "__pycache__" not in path.parts and (kind := kind_of(path))
}


def render_job(folder: Path) -> str:
    return render(make_job(env={"A": "it's"}, setup=("module load cuda",)))


def render_report(folder: Path) -> str:
    run = make_folder(folder, "name: gpt\nnodes: 2\nranks_per_node: 2\n")
    write(run, *FAILED)
    return write_report(run, status(run, None)).read_text()


def render_sandbox(name: str) -> Callable[[Path], str]:
    def rendered(folder: Path) -> str:
        asked = plan.Request(
            name="default",
            root=folder,
            nodes=2,
            gpus=2,
            accounting=True,
            shared="glusterfs",
            shared_folder=folder,
        )
        machine = plan.Machine(
            host="laptop", user="me", memory_mb=8000, slurm_version=(22, 5), subnet=3, controller_port=21000,
            database_port=21001, node_ports=(),
        )  # fmt: skip
        made = plan.Plan(request=asked, machine=machine, namespaces=True)
        return conf.render_files(made)[folder / name.removeprefix("sandbox-").removesuffix(".j2")]

    return rendered


def render_bench(folder: Path) -> str:
    write_bench_page(bench_result("collectives"), folder / "bench.html")
    return (folder / "bench.html").read_text()


def render_sweep(folder: Path) -> str:
    run = make_folder(folder, "name: gpt\nnodes: 2\nranks_per_node: 2\n")
    return write_sweep_report(folder / "sweep.html", "gpt-sweep", [status(run, None)]).read_text()


def render_card(folder: Path) -> str:
    """Render the card of a run, in a page of its own."""
    run = make_folder(folder, "name: gpt\nnodes: 2\nranks_per_node: 2\n")
    write(run, *FAILED)
    return f"<html>{card_html(read_card(run, status(run, None)))}</html>"


def render_colours(folder: Path) -> str:
    macros = template("colours.css.j2").module
    return f"{macros.light()}{macros.dark()}"


def render_array_of(folder: Path) -> str:
    return render_array([make_job(), make_job()], folder / "it's an array")


RENDERERS = {
    "job.sbatch.j2": render_job, "array.sbatch.j2": render_array_of, "report.html.j2": render_report,
    "bench.html.j2": render_bench, "sweep.html.j2": render_sweep,
    "page.html.j2": render_sweep, "card.html.j2": render_card, "colours.css.j2": render_colours,
}  # fmt: skip
RENDERERS |= {path.name: render_sandbox(path.name) for path in FILES if path.name.startswith("sandbox-")}


def check_shell(text: str) -> None:
    found = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


class Page(HTMLParser):
    """A parser that checks that the end tags match the start tags."""

    VOID = ("meta", "link", "br", "hr", "img", "col")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        """Skip an element that its start tag closes, as in SVG."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"line {self.getpos()[0]}"


def check_page(text: str) -> None:
    page = Page()
    page.feed(text)
    assert page.open == [] and text.rstrip().endswith("</html>")


def check_colours(text: str) -> None:
    """Check that the colours for a light and for a dark background have the same names."""
    names = re.findall(r"(--[\w-]+): #[0-9a-f]{6};", text)
    assert len(names) == text.count(";") > 0
    assert names[: len(names) // 2] == names[len(names) // 2 :]


def check_settings(text: str) -> None:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines and all("=" in line for line in lines)


def check_volume(text: str) -> None:
    """Check that each volume is closed, and that it is made of volumes above it."""
    blocks = re.findall(r"^volume (\S+)\n(.*?)^end-volume$", text, flags=re.M | re.S)
    assert len(blocks) == text.count("end-volume") == len(re.findall(r"^volume ", text, flags=re.M)) > 0
    known: set[str] = set()
    for name, content in blocks:
        assert re.search(r"^ +type \w+/[\w-]+$", content, flags=re.M)
        for line in re.findall(r"^ +subvolumes (.+)$", content, flags=re.M):
            assert set(line.split()) <= known
        known.add(name)


CHECKS = {
    ".sbatch": check_shell,
    ".sh": check_shell,
    ".html": check_page,
    ".css": check_colours,
    ".conf": check_settings,
    ".vol": check_volume,
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_t15_every_script_and_template_is_read_by_its_language(path: Path, tmp_path: Path) -> None:
    kind = FILES[path]
    if kind == PYTHON:
        compile(path.read_text(), path, "exec", dont_inherit=True)
    elif kind == SHELL:
        check_shell(path.read_text())
    else:
        text = RENDERERS[path.name](tmp_path)
        assert "{{" not in text and "{%" not in text
        CHECKS[Path(path.stem).suffix](text)


def test_t15_every_example_is_executed() -> None:
    tests = [TESTS / "end_to_end" / "test_examples.py", TESTS / "on_slurm" / "test_notebook.py"]
    text = "".join(test.read_text() for test in tests)
    folders = [path.name for path in sorted((ROOT / "examples").iterdir()) if path.is_dir()]
    assert [name for name in folders if f'"{name}"' not in text] == []
    programs = [path for path in FILES if "examples" in path.parts and path.stem in ("train", "plain", "fit")]
    assert [path for path in programs if f'"{path.name}"' not in text] == []
    assert len(programs) >= 8, "the pattern finds the examples"


def test_t15_the_files_of_each_kind_are_found() -> None:
    names = {kind: {path.name for path, found in FILES.items() if found == kind} for kind in FILES.values()}
    assert names.keys() == {PYTHON, SHELL, TEMPLATE}
    assert {"install-programs", "run", "a100x8.sbatch", "stub-agent.sh", "srun"} <= names[SHELL]
    assert {"make.py", "start.py", "train.py", "my_data.py"} <= names[PYTHON]
    assert {path.name for path in (ROOT / "templates").glob("*.j2")} == names[TEMPLATE]
    scripts = {path.parent.name for path in ROOT.glob("*/*.py") if not path.parent.name.startswith(".")}
    assert scripts <= {*FOLDERS, "slurmddp"}, "a folder with scripts that no test reads"
