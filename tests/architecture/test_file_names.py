"""Only `runs/folder/layout.py` names the files of a run folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from slurmddp.runs.folder.layout import RunFolder
from support import ROOT

PACKAGE = ROOT / "slurmddp"
LAYOUT = PACKAGE / "runs/folder/layout.py"
PATHS = [path for name in vars(RunFolder) if isinstance(path := getattr(RunFolder, name), Path)]
NAMES = {part for path in PATHS for part in path.parts}
OTHER_FOLDERS = {
    # The configuration of a project, which Hydra calls so.
    ("config/composition/compose.py", "config.yaml"),
    # The file by which a launched function receives the result of its ranks.
    ("launchers/local/function.py", "result.pkl"),
    # Folders beside a script that runs without a run folder.
    ("training/distributon.py", "checkpoints"),
    ("training/run_log.py", "loggers"),
    # A line of the batch script; its room may not import the layout.
    ("slurm/sbatch_options.py", "logs"),
}


def names_of_files(node: ast.AST) -> Iterator[str]:
    """Yield the text of a node if it names a file: it has a suffix, or it is a part of a path."""
    match node:
        case ast.BinOp(op=ast.Div(), right=ast.Constant(value=str(text))):
            yield text
        case ast.Call(func=ast.Name(id="Path"), args=[ast.Constant(value=str(text)), *_]):
            yield text
        case ast.Constant(value=str(text)) if "." in text:
            yield text.rpartition("/")[2]


def literals(path: Path) -> set[str]:
    """Return the names of files of a run folder that a module contains."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return NAMES.intersection(name for node in nodes for name in names_of_files(node))


def test_layout_alone_names_the_files_of_a_run_folder() -> None:
    modules = sorted(set(PACKAGE.rglob("*.py")) - {LAYOUT})
    found = {(str(path.relative_to(PACKAGE)), name) for path in modules for name in literals(path)}
    assert found == OTHER_FOLDERS


def test_each_form_of_a_name_is_found(tmp_path: Path) -> None:
    file = tmp_path / "probe.py"
    file.write_text('a = run / "code"\nb = f"{run}/config.yaml"\nc = ("job.json",)\nd = kinds["stop"]\n')
    assert literals(file) == {"code", "config.yaml", "job.json"}
