"""Start the daemons of a sandbox, and wait until they serve."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from slurmddp.errors import SlurmError
from slurmddp.sandbox import conf, network, processes
from slurmddp.sandbox.machine import find_program
from slurmddp.sandbox.plan import Plan, SandboxNode

START_LIMIT_S = 30
POLL_S = 0.03
PORT_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
LISTENING = "0A"
"""The kernel's code for a socket that listens."""


def write_files(plan: Plan) -> None:
    """Write configuration, munge key and fake GPUs into the state folder, readable only by this account."""
    for name in ("log", "run", "state", "spool", "gpus"):
        (plan.root / name).mkdir(exist_ok=True)
    for node in plan.nodes:
        (plan.root / "spool" / node.name).mkdir(exist_ok=True)

    for path, text in conf.render_files(plan).items():
        path.write_text(text, encoding="utf-8")
        path.chmod(0o700 if path.suffix == ".sh" else 0o600)

    # A fake GPU is a link to /dev/null, because SLURM accepts only character devices as GPUs.
    for index in range(plan.request.gpus):
        (plan.root / "gpus" / f"gpu{index}").symlink_to("/dev/null")

    key = plan.root / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)


def start_all(plan: Plan, environment: Mapping[str, str]) -> None:
    """Start all daemons, and wait until all nodes are idle."""
    _start_munged(plan, environment)
    if plan.request.accounting:
        _start_database(plan, environment)
        _start_accounting(plan, environment)

    start_controller(plan, environment)

    for node in plan.nodes:
        start_node(plan, node, environment)

    names = [node.name for node in plan.nodes]
    wait_for(plan, "idle nodes", lambda: idle(plan, environment), ["slurmctld", *names])


def _start_munged(plan: Plan, environment: Mapping[str, str]) -> None:
    root = plan.root
    command = [
        "munged",
        "--foreground",
        # munged refuses a private socket without this flag.
        "--force",
        f"--key-file={root}/munge.key",
        f"--socket={plan.munge_socket}",
        f"--pid-file={root}/run/munged.munge",
        f"--log-file={root}/log/munged.log",
        f"--seed-file={root}/munge.seed",
        "--num-threads=10",
    ]
    _start(plan, environment, command)
    wait_for(plan, "munged", lambda: listens_unix(plan.munge_socket), ["munged"])


def _start_database(plan: Plan, environment: Mapping[str, str]) -> None:
    root = plan.root
    common = ["--no-defaults", f"--datadir={root}/mariadb", f"--user={plan.machine.user}"]
    # This method is needed because slurmdbd connects without a password.
    install = ["--auth-root-authentication-method=normal", "--skip-test-db", "--force"]
    _run(plan, environment, ["mariadb-install-db", *common, *install])

    # MariaDB stores a database in a folder of its name; this name is StorageLoc of slurmdbd.conf. A slurmdbd
    # that has to create the database reconnects on the handle that failed, and MariaDB's client library
    # 11.8.9 then refuses every result.
    (root / "mariadb/slurm_acct").mkdir()
    command = [
        "mariadbd",
        *common,
        f"--socket={database_socket(plan)}",
        f"--pid-file={root}/run/mariadbd.mariadb",
        "--skip-networking",
        "--skip-name-resolve",
        "--skip-log-bin",
        "--innodb-buffer-pool-size=32M",
        # slurmdbd demands this time-out.
        "--innodb-lock-wait-timeout=900",
        # The database is removed with the sandbox, so a crash that loses its last second does no harm.
        "--innodb-flush-log-at-trx-commit=0",
    ]
    _start(plan, environment, command)
    wait_for(plan, "mariadbd", lambda: listens_unix(database_socket(plan)), ["mariadbd"])


def _start_accounting(plan: Plan, environment: Mapping[str, str]) -> None:
    # slurmdbd has no option for the socket, but its client library reads this variable.
    database_environment = {**environment, "MYSQL_UNIX_PORT": str(database_socket(plan))}
    _start(plan, database_environment, ["slurmdbd", "-D"])
    wait_for(plan, "slurmdbd", lambda: listens_tcp(plan.machine.database_port), ["slurmdbd"])
    _run(plan, environment, ["sacctmgr", "--immediate", "add", "cluster", plan.request.name])


def start_controller(plan: Plan, environment: Mapping[str, str]) -> None:
    """Start slurmctld, and wait until it listens."""
    _start(plan, environment, ["slurmctld", "-D"])
    wait_for(plan, "slurmctld", lambda: listens_tcp(plan.machine.controller_port), ["slurmctld"])


def start_node(plan: Plan, node: SandboxNode, environment: Mapping[str, str]) -> None:
    """Start the slurmd of a node, in the node's namespaces if it has any."""
    folder = plan.root / "spool" / node.name
    # nsenter changes the working folder together with the mount namespace.
    slurmd = ["env", f"--chdir={folder}", find_program("slurmd", environment["PATH"]), "-D", "-N", node.name]
    processes.start(
        node.name,
        [*network.enter(plan, node, environment), *slurmd],
        root=plan.root,
        environment=environment,
        folder=folder,
    )


def database_socket(plan: Plan) -> Path:
    """Return the socket of the sandbox's MariaDB."""
    return plan.root / "mariadb.socket"


def _start(plan: Plan, environment: Mapping[str, str], argv: list[str]) -> None:
    """Start a daemon; its record and its log are named after its program."""
    command = [find_program(argv[0], environment["PATH"]), *argv[1:]]
    processes.start(argv[0], command, root=plan.root, environment=environment)


def _run(plan: Plan, environment: Mapping[str, str], argv: list[str]) -> str:
    """Run a program to its end; return its output, or raise SlurmError if it fails."""
    result = subprocess.run(
        [find_program(argv[0], environment["PATH"]), *argv[1:]],
        env=dict(environment),
        cwd=plan.root,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if result.returncode != 0:
        raise SlurmError(
            f"{argv[0]} failed: {(result.stderr or result.stdout).strip()[-800:]}",
            hint="Repair the installation, or leave out --accounting if it was asked for.",
        )

    return result.stdout


def wait_for(plan: Plan, what: str, ready: Callable[[], bool], daemons: list[str]) -> None:
    """Wait until `ready` returns True.

    Args:
        plan: the plan of the sandbox.
        what: the name of the awaited state, for the error.
        ready: called every 30 ms.
        daemons: names of daemons, all of which must run.

    Raises:
        SlurmError: a daemon has ended, or 30 s are over; with the last lines of the daemons' logs.
    """
    deadline = time.monotonic() + START_LIMIT_S
    while not ready():
        records = processes.recorded(plan.root)
        dead = [name for name in daemons if name not in records or not records[name].alive()]
        if dead or time.monotonic() > deadline:
            reason = f"{', '.join(dead)} ended" if dead else f"no {what} after {START_LIMIT_S} s"
            raise SlurmError(
                f"The sandbox did not start: {reason}.{tails(plan, dead or daemons)}",
                hint="All processes and files of the sandbox were removed again.",
            )

        time.sleep(POLL_S)


def tails(plan: Plan, daemons: list[str], lines: int = 12) -> str:
    """Return the last lines of the logs of daemons, each under the name of its file."""
    blocks = []
    for name in daemons:
        for path in (plan.root / "log" / f"{name}.log", plan.root / "log" / f"{name}.out"):
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            # A daemon that ends before it opens its log prints its error, so its output is the second choice.
            if text.strip():
                tail = "\n".join("    " + line for line in text.strip().splitlines()[-lines:])
                blocks.append(f"\n  {path.name}:\n{tail}")
                break

    if not blocks:
        return ""
    return "".join(blocks) + "\n"


def node_states(plan: Plan, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the state of each node (`idle`, `mixed`, `down`), by name; empty if SLURM does not answer."""
    command = ["sinfo", "--noheader", "--partition=low", "--Node", "--format=%N|%T"]
    try:
        output = _run(plan, environment, command)
    except SlurmError:
        return {}

    return dict(line.strip().split("|", 1) for line in output.splitlines())


def idle(plan: Plan, environment: Mapping[str, str]) -> bool:
    """Return whether all nodes are idle."""
    states = node_states(plan, environment)
    return len(states) == len(plan.nodes) and set(states.values()) == {"idle"}


def listens_unix(path: Path) -> bool:
    """Return whether a process accepts connections on a unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def listens_tcp(port: int) -> bool:
    """Return whether a process listens on a TCP port of this machine."""
    # The kernel's tables are read, because a trial connection would leave an error in the daemon's log.
    tables = [path.read_text(encoding="ascii") for path in map(Path, PORT_TABLES) if path.exists()]
    rows = (line.split() for table in tables for line in table.splitlines()[1:])
    return any(row[1].endswith(f":{port:04X}") and row[3] == LISTENING for row in rows)
