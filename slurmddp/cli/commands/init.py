"""Write a project folder: configuration, an example model and, if SLURM answers, cluster files.

slurmddp init my-project     writes conf/, my_model.py and .gitignore; an existing file is never changed
slurmddp init --agent        also AGENTS.md and a skill, by which a coding agent runs trainings

In a project that exists, it writes conf/.schema again, by which editors complete and check the YAML files,
and no example.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from slurmddp import templates
from slurmddp.cli.new_files import write_new, write_schemas
from slurmddp.errors import EXIT_FINISHED, ConfigError, SlurmError

_CONFIG = Path("conf/slurmddp.yaml")
"""The file by which a project is recognized."""
_HIDDEN = ("gitignore", "agents")
"""Files and folders of a template whose names begin with a dot in the project.

Tools that search the template for rules of their own would find such names.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the argument of `slurmddp init`."""
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="the project (default: this folder)",
    )
    parser.add_argument(
        "--agent",
        action="store_true",
        help="also write AGENTS.md and .agents/skills/slurmddp/SKILL.md, for coding agents",
    )


def run(args: argparse.Namespace) -> int:
    """Write the files of a project, and print the command to type next; return the exit code."""
    folder: Path = args.folder
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, not a folder.", hint="Choose another name.")

    clusters = _cluster_files()
    texts = dict(clusters)
    # A project that has its configuration may have removed the examples.
    if not (folder / _CONFIG).exists():
        texts = {**_files("project"), **clusters}
    if args.agent:
        texts |= _files("agent")
    for line in write_new(folder, texts):
        print(line)
    print(write_schemas(folder))

    place = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    print(f"next    {place}slurmddp train name=first")
    if clusters:
        print(f"        slurmddp train +cluster={next(iter(clusters)).stem} name=first --check")

    return EXIT_FINISHED


def _files(template: str) -> dict[Path, str]:
    """Return the text of each file of a folder of `templates`, by its path in the project."""
    root = Path(templates.__file__).with_name(template)
    texts = {
        path.relative_to(root): path.read_text(encoding="utf-8")
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    return {Path(f".{name}") if name.parts[0] in _HIDDEN else name: text for name, text in texts.items()}


def _cluster_files() -> dict[Path, str]:
    """Return the texts of drafts of cluster files, by their paths in the project.

    Empty if this machine has no SLURM commands, or if SLURM does not answer, which is printed as a note.
    """
    from slurmddp.cli.commands.cluster import drafts
    from slurmddp.slurm import client
    from slurmddp.slurm.limits.queries import describe

    if not client.on_path():
        return {}

    try:
        return drafts(describe(client.SlurmClient()))
    except SlurmError as error:
        reason = " ".join(f"{error.message} {error.hint}".split())
        print(f"slurmddp: note: no cluster files were written: {reason}", file=sys.stderr)
        return {}
