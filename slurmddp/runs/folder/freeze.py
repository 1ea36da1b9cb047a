"""Freeze the batch step into one file: a zip of modules that any Python from 3.8 on can run.

A job then runs the program of its submission, even if slurmddp was updated or removed since.
"""

from __future__ import annotations

import io
import marshal
import zipfile
from functools import cache
from importlib.util import MAGIC_NUMBER, find_spec, source_hash
from pathlib import Path

MODULES = (
    "slurmddp.batch.__main__",
    "slurmddp.batch.attempt",
    "slurmddp.batch.begin",
    "slurmddp.batch.end",
    "slurmddp.batch.event_command",
    "slurmddp.batch.node_exclusion",
    "slurmddp.batch.first_node",
    "slurmddp.batch.launch_failure",
    "slurmddp.batch.requeue_policy",
    "slurmddp.batch.progress",
    "slurmddp.batch.requeue",
    "slurmddp.batch.setup_lines",
    "slurmddp.batch.slurm_job",
    "slurmddp.batch.srun_watch",
    "slurmddp.batch.staged_environment",
    "slurmddp.environments.hostlist",
    "slurmddp.environments.job_id",
    "slurmddp.environments.names",
    "slurmddp.environments.scrub",
    "slurmddp.errors",
    "slurmddp.host.file_lock",
    "slurmddp.host.regular_file",
    "slurmddp.runs.folder.excluded_nodes",
    "slurmddp.runs.folder.jsonl",
    "slurmddp.runs.folder.late_files",
    "slurmddp.runs.folder.layout",
    "slurmddp.runs.folder.owner",
    "slurmddp.short_text",
    "slurmddp.slurm.command",
    "slurmddp.slurm.command_output",
    "slurmddp.slurm.job_script",
    "slurmddp.slurm.rejections",
    "slurmddp.slurm.units",
)
"""The modules of the batch step; each imports these and the standard library alone."""
_START = """\
import sys
if sys.version_info < (3, 8):
    sys.exit("The batch step needs Python 3.8 or later; %s is older. Nothing was started." % sys.executable)
import os
from slurmddp.batch.__main__ import main
sys.exit(main(sys.argv[1:], os.environ))
"""


@cache
def batch_program() -> bytes:
    """Return a zip archive with the program of the batch step, which `python FILE` runs.

    The same modules always give the same bytes.
    """
    files = {"__main__.py": _START.encode()}
    for module in MODULES:
        path = Path(*module.split("."))
        files.update({f"{folder}/__init__.py": b"" for folder in [*path.parents][:-1]})

        source = _source(module)
        files[f"{path}.py"] = source
        # The bytecode is included: at the end of an attempt SLURM leaves too few seconds to compile the
        # modules.
        files[f"{path}.pyc"] = _compiled(source, f"{path}.py")

    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in files.items():
            # A ZipInfo has the date 1980-01-01 unless given another, so the bytes don't depend on the time.
            archive.writestr(zipfile.ZipInfo(name), content)
    return stream.getvalue()


@cache
def _source(module: str) -> bytes:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{module}, a module of the batch step, was not found", name=module)
    return Path(spec.origin).read_bytes()


@cache
def _compiled(source: bytes, name: str) -> bytes:
    """Return the content of a module's `.pyc` file for this version of Python, in the format of PEP 552."""
    # The flag 1 means an unchecked hash: Python loads the bytecode without a comparison with the source.
    unchecked = (1).to_bytes(4, "little")
    return MAGIC_NUMBER + unchecked + source_hash(source) + marshal.dumps(compile(source, name, "exec"))
