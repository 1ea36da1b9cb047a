"""Copy the reports of runs over ssh to this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from slurmddp.control.events import Report, ignore
from slurmddp.control.report import Reported, report
from slurmddp.control.ssh.runs import call, own_files
from slurmddp.errors import SlurmddpError
from slurmddp.runs import ssh_runs
from slurmddp.runs.ssh_runs import SshRun


def fetch_report(run: SshRun, notify: Report = ignore) -> Reported:
    """Write the report of a run or a sweep on its host, and copy it to this machine.

    The page of a sweep links to the reports of its runs, so these are copied as well.

    Args:
        run: the run or sweep.
        notify: called with `HostGreeting` and `HostSilent` (see `exchange`).

    Returns:
        The report, with the paths of the copies.

    Raises:
        LoginNodeError: the host can't be reached.
        SlurmddpError: a report can't be written on the host, or can't be read.
    """
    reported = call(run, report, run.name, options={"report": notify})
    pages = [
        PurePosixPath(str(path).removeprefix(f"{run.host}:")) for path in (reported.path, *reported.runs)
    ]
    runs_dir = pages[0].parent
    if not reported.is_sweep:
        runs_dir = runs_dir.parent

    page, *others = _copies(run, runs_dir, pages)
    return replace(reported, path=page, runs=tuple(others))


def _copies(run: SshRun, runs_dir: PurePosixPath, pages: Sequence[PurePosixPath]) -> list[Path]:
    """Copy HTML pages from the host to a private folder on this machine, and return the paths of the copies.

    Args:
        run: a run or sweep on the host.
        runs_dir: the folder on the host that has to contain the pages; the copies keep their paths in it.
        pages: the paths of the pages on the host.

    Raises:
        SlurmddpError: a page is missing, or is not inside `runs_dir`.
    """
    reports = ssh_runs.records_file().parent / "reports"
    reports.mkdir(mode=0o700, parents=True, exist_ok=True)
    reports.chmod(0o700)

    copies = []
    for page, content in zip(pages, own_files(run, [str(page) for page in pages]), strict=True):
        if content is None or ".." in page.parts or not page.is_relative_to(runs_dir):
            raise SlurmddpError(
                f"The report {run.host}:{page} does not exist, or is not in the folder of the runs."
            )

        copy = reports / run.host / page.relative_to(runs_dir)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
        copies.append(copy)

    return copies
