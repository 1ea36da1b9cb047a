"""Run a command on a login node, by the user's own ssh, and pass its output and exit code through.

A submission first sends the project's code with rsync. Then the same command line runs in the project's
folder on the login node. Commands about that run later run in the same folder. ssh and rsync are the
system's, with the user's configuration, keys and agent.
"""

from __future__ import annotations

import argparse
import errno
import html
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from slurmddp import __version__
from slurmddp.cli.messages import UsageError
from slurmddp.environments.names import OVER_SSH_VARIABLE
from slurmddp.errors import EXIT_FINISHED, ConfigError, LoginNodeError, SlurmddpError
from slurmddp.host import browser
from slurmddp.runs import ssh_runs
from slurmddp.runs.folder import code_snapshot
from slurmddp.runs.folder.layout import REPORT_FILE
from slurmddp.runs.ssh_runs import SshRun
from slurmddp.runs.text_format import counted

_NAMES = {"list": ("sweep",), "diff": ("first", "second")}
"""The arguments that name runs, where it is not `run` alone."""
_CONNECT_S = 20
"""Seconds for which ssh waits for the host."""
_UNREACHABLE = 255
"""Exit code of ssh for its own failures."""
_NOT_FOUND = 127
"""Exit code of a shell that does not find the program."""
_NAMED = re.compile(
    r"(?:follow +slurmddp status|(?P<sweep>sweep) +slurmddp list) (?P<name>\S+)|(?P<ended>\S+) is finished: "
)
"""The line with which a submission names its run or sweep (`cli/start_run.py`, `cli/start_sweep.py`), or
says that it has ended (`cli/commands/train.py`)."""
_POINT = re.compile(r"point +(?P<number>\d+) of \d+ +(?P<name>\S+)")
"""The line with which a submission begins a point of a sweep (`cli/start_sweep.py`)."""


@dataclass(frozen=True, kw_only=True)
class LoginNode:
    """The place where commands run: a host, the project's folder on it, and its interpreter."""

    host: str
    folder: str
    python: str | None = None

    def line(self, arguments: Sequence[str]) -> str:
        """Return the shell's line that runs slurmddp with `arguments` in the folder."""
        program = [self.python, "-m", "slurmddp"] if self.python else ["slurmddp"]
        words = shlex.join(["env", f"{OVER_SSH_VARIABLE}=1", *program, *arguments])
        return f"cd {shlex.quote(self.folder)} && exec {words}"

    def ssh(self, line: str, *, terminal: bool = False, silent: bool = False) -> list[str]:
        """Return the command that runs `line` on the host, in a login shell: its profile sets the PATH.

        Args:
            line: a line of shell.
            terminal: whether the line gets this terminal.
            silent: whether ssh asks nothing, although there is a terminal.
        """
        # Output of the profile goes to stderr, so that the output of the line is whole.
        profiled = f"exec bash -lc {shlex.quote(f'exec >&3 3>&-; {line}')} 3>&1 >&2"
        # With a terminal ssh tells the end of each connection, unless it tells errors only.
        kind = ["-t", "-o", "LogLevel=ERROR"] if terminal else ["-T"]
        return [*_ssh(silent=silent), *kind, "--", self.host, f"sh -c {shlex.quote(profiled)}"]

    def unreachable(self) -> LoginNodeError:
        return LoginNodeError(
            f"{self.host} can't be reached by ssh, or the connection broke; ssh says why above.",
            hint=f"`{shlex.join(['ssh', *_batch(), self.host, 'true'])}` must work without slurmddp. "
            "A job that is queued there stays.",
        )

    def without_slurmddp(self) -> LoginNodeError:
        program = f"{self.python} -m slurmddp" if self.python else "slurmddp"
        return LoginNodeError(
            f"{self.host} can't run `{program}`.",
            hint=f"Install it there (pip install slurmddp=={__version__}), and name its interpreter in the "
            "cluster file: python: /path/to/python.",
        )


def _ssh(*, silent: bool = False) -> list[str]:
    return ["ssh", "-o", f"ConnectTimeout={_CONNECT_S}", *_batch(silent=silent)]


def _batch(*, silent: bool = False) -> list[str]:
    """Return the option with which ssh asks nothing; without a terminal nobody could answer."""
    asks = not silent and sys.stdin is not None and sys.stdin.isatty()
    return [] if asks else ["-o", "BatchMode=yes"]


def start(keys: dict[str, str | None], typed: Sequence[str]) -> int:
    """Run a submission on the login node of its settings, and return the exit code.

    Args:
        keys: the keys of the login node.
        typed: the whole command line, without `slurmddp`.

    Raises:
        LoginNodeError: the host can't be reached, or it can't run this version; nothing was started.
    """
    return _record(_send_code(keys), typed)[0]


def forward(name: str, typed: Sequence[str], parsed: argparse.Namespace) -> int | None:
    """Run a command about a run on the login node of the run, and return the exit code.

    Args:
        name: the command.
        typed: the whole command line, without `slurmddp`.
        parsed: its parsed words for slurmddp.

    Returns:
        The exit code of the command there; None if the command belongs to this machine.

    Raises:
        LoginNodeError: the host can't be reached, or it can't run slurmddp.
    """
    if os.environ.get(OVER_SSH_VARIABLE):
        return None
    if (found := _named_by_run(name, typed, parsed)) is None:
        return None
    run, arguments = found
    node = LoginNode(host=run.host, folder=run.folder, python=run.python)
    if name == "report" or (name == "open" and not parsed.folder):
        return _fetch_report(node, run.name, show=name == "open")
    if name in ("resume", "rerun"):
        return _record(node, arguments)[0]
    code = _pass_through(node, arguments)
    if name == "rm" and code == EXIT_FINISHED:
        ssh_runs.remember(replace(run, removed=True))
    return code


def submit(words: Sequence[str], *flags: str) -> list[SshRun] | None:
    """Start `slurmddp train` on the login node that settings name, and return its runs.

    Args:
        words: the settings.
        flags: flags of `slurmddp train`; with `--multirun` the settings are a sweep.

    Returns:
        The run, or the runs of a sweep in the order of its points; None if the settings name no login node.

    Raises:
        LoginNodeError: the host can't be reached, or it can't run this version; nothing was started.
        SlurmddpError: slurmddp on the host did not start all runs.
    """
    from slurmddp.config.composition.compose import login_node

    if (keys := login_node(words, Path.cwd())) is None:
        return None
    node = _send_code(keys)
    code, runs = _record(node, ["train", *words, *flags])
    if code or not runs:
        raise SlurmddpError(
            f"{node.host} did not start all runs (exit code {code}).",
            hint="slurmddp on the host says why above.",
        )
    return runs


def answer(run: SshRun, *arguments: str) -> str:
    """Run slurmddp on the host of a run, and return its output.

    Raises:
        LoginNodeError: the host can't be reached, or it can't run slurmddp.
        SlurmddpError: the command failed.
    """
    node = LoginNode(host=run.host, folder=run.folder, python=run.python)
    code, output = _captured(node, node.line(arguments))
    if _judged(node, code):
        raise SlurmddpError(
            f"`slurmddp {shlex.join(arguments)}` failed on {run.host} (exit code {code}).",
            hint="slurmddp on the host says why above.",
        )
    return output


def own_file(run: SshRun, path: str) -> bytes | None:
    """Return the bytes of a file on the host of a run; None if no file of this account is there."""
    node = LoginNode(host=run.host, folder=run.folder, python=run.python)
    file = shlex.quote(path)
    command = node.ssh(f"[ ! -O {file} ] || exec cat -- {file}")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    if done.returncode == _UNREACHABLE:
        raise node.unreachable()
    return done.stdout or None


def _named_by_run(
    name: str, typed: Sequence[str], parsed: argparse.Namespace
) -> tuple[SshRun, list[str]] | None:
    """Return the run over ssh that a command is about, and its words with the whole name; None if none is."""
    given = [getattr(parsed, key) for key in _NAMES.get(name, ("run",))]
    if name == "list" and given == [None]:
        return None
    found = [ssh_runs.find(one) for one in given]
    runs = [run for run in found if run is not None]
    if not runs:
        return None
    if len(runs) < len(found) or len({run.host for run in runs}) > 1:
        raise UsageError("The two runs lie on different machines.", hint="Compare runs of one cluster.")
    arguments = list(typed)
    for one, run in zip(given, runs, strict=True):
        if one is None:
            arguments.append(run.name)
        else:
            arguments[arguments.index(one, arguments.index(name) + 1)] = run.name
    return runs[-1], arguments


def _send_code(keys: dict[str, str | None]) -> LoginNode:
    """Send the code of the project in this folder to a login node, and return the place where it lies there.

    Raises:
        LoginNodeError: the host can't be reached, has another version, or did not get all files.
        ConfigError: the code is too large.
    """
    _require_rsync()
    project = Path.cwd()
    files = [str(path.relative_to(project)) for path in code_snapshot.code_of(project)]
    node = _prepared(
        LoginNode(
            host=keys["ssh"] or "",
            folder=(keys["ssh_folder"] or f"slurmddp/{project.name}").removeprefix("~/"),
            python=keys["python"],
        )
    )
    # Files that were sent before and are deleted here are deleted there, and no others.
    gone = [
        name for name in ssh_runs.sent_files(node.host, node.folder) if not os.path.lexists(project / name)
    ]
    code = _rsync(
        node, ["-lp", "--delete-missing-args", f"{project}/", f"{node.host}:{node.folder}/"], [*files, *gone]
    )
    if code:
        raise LoginNodeError(
            f"The code did not reach {node.host}:{node.folder} whole (rsync's exit code is "
            f"{code}; rsync says why above). Nothing was started.",
            hint="Check the connection, the rights and free space of the folder, and rsync on the host. "
            "The same command sends what is missing.",
        )
    ssh_runs.remember_sent_files(node.host, node.folder, files)
    print(f"code    {node.host}:{node.folder}  ({counted(len(files), 'file')})", file=sys.stderr, flush=True)
    return node


def _require_rsync() -> None:
    if shutil.which("rsync") is None:
        raise LoginNodeError(
            "There is no rsync on this machine's PATH, which copies files.",
            hint="Install rsync, here and there.",
        )


def _rsync(node: LoginNode, arguments: Sequence[str], names: Sequence[str]) -> int:
    """Copy the files of these names, below the source folder of `arguments`; return rsync's exit code."""
    command = ["rsync", "-t", "--protect-args", "--from0", "--files-from=-", "-e", shlex.join(_ssh())]
    given = b"".join(os.fsencode(name) + b"\0" for name in names)
    code = subprocess.run([*command, *arguments], input=given, check=False).returncode
    if code == _UNREACHABLE:
        raise node.unreachable()
    return code


def _prepared(node: LoginNode) -> LoginNode:
    """Create the project's folder on the host, and compare versions.

    Returns:
        The node, with the folder as an absolute path.
    """
    folder, program = shlex.quote(node.folder), shlex.quote(node.python or "")
    version = f"{program} -m slurmddp --version" if node.python else "slurmddp --version"
    # In a git repository a run keeps a snapshot of its code, so that later copies don't change waiting jobs.
    repository = "{ [ -e .git ] || git init --quiet . || true; }"
    code, output = _captured(
        node, f"cd && mkdir -p -- {folder} && cd -- {folder} && {repository} && pwd && {version}"
    )
    lines = output.splitlines()
    if code:
        if lines and lines[-1].startswith("/"):
            raise node.without_slurmddp()
        raise LoginNodeError(
            f"The folder {node.folder} can't be created on {node.host}; its shell says why above.",
            hint="Name another folder in the cluster file: ssh_folder: /path/of/yours.",
        )
    if lines[-1] != f"slurmddp {__version__}":
        raise LoginNodeError(
            f"{node.host} has {lines[-1]}, this machine slurmddp {__version__}. Nothing was sent.",
            hint="Install the same version on both.",
        )
    return replace(node, folder=lines[-2])


def _captured(node: LoginNode, line: str) -> tuple[int, str]:
    """Run a line of shell on the host; return its exit code and its output."""
    done = subprocess.run(node.ssh(line), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    if done.returncode == _UNREACHABLE:
        raise node.unreachable()
    return done.returncode, done.stdout.decode(errors="replace")


def _pass_through(node: LoginNode, arguments: Sequence[str]) -> int:
    """Run slurmddp on the host with this terminal; return its exit code."""
    terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    sys.stdout.flush()
    stdin = None if terminal else subprocess.DEVNULL
    return _judged(
        node, subprocess.run(node.ssh(node.line(arguments), terminal=terminal), stdin=stdin).returncode
    )


def _record(node: LoginNode, arguments: Sequence[str]) -> tuple[int, list[SshRun]]:
    """Run slurmddp on the host, and record the runs and the sweep that its output names.

    Returns:
        The exit code, and the runs, those of a sweep in the order of its points.
    """
    runs: list[SshRun] = []
    points: dict[int, SshRun] = {}
    with _started(node.ssh(node.line(arguments))) as process:
        for raw in process.stdout or ():
            line = raw.decode(errors="replace")
            run = partial(SshRun, host=node.host, folder=node.folder, python=node.python)
            if point := _POINT.match(line):
                points[int(point["number"])] = run(name=point["name"])
            elif (named := _NAMED.match(line)) and named["sweep"]:
                runs = [points[number] for number in sorted(points)]
                ssh_runs.remember(*runs, run(name=named["name"], is_sweep=True))
            elif named:
                runs.append(run(name=named["name"] or named["ended"]))
                ssh_runs.remember(runs[-1])
            print(line, end="", flush=True)
    return _judged(node, process.returncode), runs


def _started(command: Sequence[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    except OSError as error:
        if error.errno != errno.E2BIG:
            raise
        raise ConfigError(
            f"The command has {len(command[-1])} characters, and Linux hands at most 131072 to ssh. "
            "Nothing was started.",
            hint="Give fewer values at once, or large values as the path of a file.",
        ) from error


def _judged(node: LoginNode, code: int) -> int:
    """Return the exit code of a command on the host; raise the error if it did not run there."""
    if code == _UNREACHABLE:
        raise node.unreachable()
    if code == _NOT_FOUND:
        raise node.without_slurmddp()
    return code


def _fetch_report(node: LoginNode, name: str, *, show: bool) -> int:
    """Let the host write the report of a run or sweep, copy it here, print its path and open it.

    The page of a sweep links to the reports of its runs, so these are copied too.
    """
    _require_rsync()
    code, output = _captured(node, node.line(["report", name]))
    for path in (line for line in output.splitlines() if line.startswith("/")):
        page = PurePosixPath(path)
        runs = page.parent if (is_sweep := page.name != REPORT_FILE) else page.parent.parent
        copies = ssh_runs.records_file().parent / "reports" / node.host
        copies.mkdir(parents=True, exist_ok=True)
        copy = copies / page.relative_to(runs)
        _copy_here(node, runs, [str(page.relative_to(runs))], copies)
        if is_sweep and (linked := _linked_reports(copy.read_text(encoding="utf-8"))):
            _copy_here(node, runs, linked, copies)
        print(copy)
        if show:
            browser.show(copy)
    return _judged(node, code)


def _copy_here(node: LoginNode, folder: PurePosixPath, names: Sequence[str], here: Path) -> None:
    # Reports are text that shrinks to a tenth.
    if code := _rsync(node, ["-z", f"{node.host}:{folder}/", f"{here}/"], names):
        raise LoginNodeError(
            f"The report did not arrive whole from {node.host}:{folder} (rsync's exit code is {code}).",
            hint="rsync says why above. The same command copies what is missing.",
        )


def _linked_reports(page: str) -> list[str]:
    """Return the reports of runs to which the page of a sweep links, as paths beside it."""
    links = re.findall(rf'href="([^"/]+)/{re.escape(REPORT_FILE)}"', page)
    return [f"{unquote(html.unescape(link))}/{REPORT_FILE}" for link in links]
