"""A login node: a real sshd on this machine, with another home, in front of a SLURM."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.slurm.slurm_jobs import FakePrograms

_START_S = 60
_BREAKING = """#!{python}
import subprocess
import sys

process = subprocess.Popen(["{real}", *sys.argv[1:]], stdout=subprocess.PIPE)
for line in process.stdout:
    is_last = b"{mark}" in line
    if is_last:
        process.kill()
    sys.stdout.buffer.write(line)
    sys.stdout.flush()
    if is_last:
        sys.exit(255)
sys.exit(process.wait())
"""


@dataclass(frozen=True)
class LoginNode:
    """The node `login1`.

    The ssh in `programs` knows the hosts `login1`, and `down`, which does not answer.
    """

    home: Path
    slurm: FakePrograms
    programs: Path
    """A folder for the PATH of the laptop: an ssh with the keys and hosts of the test."""
    working: str
    """The program `slurmddp` of the login node, as lines of shell."""

    def slurmddp(self, text: str) -> None:
        """Replace the program `slurmddp` of the login node."""
        program = self.home / "bin" / "slurmddp"
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)

    @contextmanager
    def connection_that_breaks(self, mark: str) -> Iterator[None]:
        """Let each connection break once the host has sent a line with `mark`."""
        ssh = self.programs / "ssh"
        working = ssh.read_text()
        real = self.programs / "real-ssh"
        real.write_text(working)
        real.chmod(0o755)
        ssh.write_text(_BREAKING.format(python=sys.executable, real=real, mark=mark))

        try:
            yield
        finally:
            ssh.write_text(working)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _key(path: Path) -> str:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path.with_suffix(".pub").read_text()


@contextmanager
def login_node(
    folder: Path,
    slurm: Mapping[str, str] | None = None,
    python: str = sys.executable,
    shell: str | None = None,
) -> Iterator[LoginNode]:
    """Start sshd, and end it with all its sessions.

    Args:
        folder: the folder for its files.
        slurm: variables of its SLURM; None: a SLURM of fake programs.
        python: the interpreter of the program `slurmddp` on the login node.
        shell: the program that reads command lines, as the login shell of an account does; None: this
            account's own.
    """
    folder.mkdir()
    home = folder / "home"
    programs = folder / "programs"
    (home / "bin").mkdir(parents=True)
    programs.mkdir()
    port = _free_port()
    host_key = folder / "host_key"
    own_key = folder / "key"
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {_key(host_key)}")
    (folder / "authorized_keys").write_text(_key(own_key))
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {host_key}\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nPermitRootLogin yes\nSetEnv HOME={home}\n"
    )
    if shell is not None:
        with (folder / "sshd_config").open("a") as config:
            config.write(f'ForceCommand exec {shell} -c "$SSH_ORIGINAL_COMMAND"\n')

    # The ssh configuration of a person may start each session with a command.
    (folder / "ssh_config").write_text(
        f"Host login1\n  Port {port}\n  RemoteCommand bash -l\n  RequestTTY force\n"
        f"Host down\n  Port {_free_port()}\nHost *\n  HostName 127.0.0.1\n"
        f"  User {getpass.getuser()}\n  IdentityFile {own_key}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {folder}/known_hosts\n"
    )
    (programs / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    (programs / "ssh").chmod(0o755)
    node = LoginNode(home, FakePrograms(folder / "slurm"), programs, f'exec {python} -m slurmddp "$@"')
    exports = {"PATH": os.environ["PATH"], **(slurm or node.slurm.environ), "PYTHONDONTWRITEBYTECODE": "1"}
    exports["PATH"] = f"{home}/bin:{exports['PATH']}"
    # A profile may print a greeting, or read from standard input. The greeting must not count as an answer,
    # and the profile must not read the request.
    (home / ".bash_profile").write_text(
        "".join(f"export {name}={shlex.quote(value)}\n" for name, value in exports.items())
        + "echo Welcome to login1; read -r project; echo -n 'No line break'\n"
    )
    node.slurmddp(node.working)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    assert sshd is not None, "there is no sshd: `make slurm` installs it"
    with (folder / "sshd.log").open("wb") as log:
        server = subprocess.Popen([sshd, "-D", "-e", "-f", folder / "sshd_config"], stderr=log)

    try:
        _wait(port, server, folder / "sshd.log")
        yield node
    finally:
        server.terminate()
        server.wait()


def _wait(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.02)

    raise AssertionError(log.read_text())
