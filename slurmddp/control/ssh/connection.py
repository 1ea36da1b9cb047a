"""One request to slurmddp on a login node, over the user's own ssh.

The host first proves with a nonce that slurmddp runs, because the exit code of a shell proves nothing. The
request is sent on standard input, so that it appears in no list of processes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, cast

from slurmddp import __version__
from slurmddp.control.events import HostGreeting, HostOutput, HostSilent, Report, ignore
from slurmddp.control.json_encoding import error_from_json
from slurmddp.control.ssh.host_stderr import HostMessages
from slurmddp.errors import LoginNodeError

FLAG = "--over-ssh"
"""The hidden flag by which slurmddp on the host serves one request (see `serve`)."""
END_OF_REQUEST = b"exit 68\n"
"""The line after the request. A shell that runs in place of slurmddp executes it, and ends."""
_PROOF = "proof"
"""The key of the proof in lines that are meant for the laptop, not for a person."""
_CONNECT_S = 20
"""Seconds for which ssh waits for a connection."""
_NOTE_S = 30.0
"""Seconds without an answer after which a note names likely causes."""
_ANSWER_S = 300.0
"""Seconds to wait for the proof: a person may have to enter a password, and a profile may be slow."""
_PIECE_BYTES = 1 << 20
_MAX_GREETING_BYTES = 1 << 28
"""Number of bytes that shells and profiles of a host may print before slurmddp runs (256 MiB)."""
_UNREACHABLE = 255
"""Exit code of ssh for its own failures."""
_LINGER_S = 1.0
"""Seconds that ssh gets after the end of the command to pass on its last messages.

ssh itself may never end: a program that a profile starts in the background, such as ssh-agent, keeps the
connection open.
"""


@dataclass(frozen=True, kw_only=True)
class LoginNode:
    """A host, the project's folder on it, and the interpreter that has slurmddp."""

    host: str
    """The name of the host for ssh."""
    folder: str
    """Path of the project's folder, absolute or relative to the home directory."""
    python: str | None = None
    """Path of the interpreter; None: the program `slurmddp` on the PATH."""

    @property
    def program(self) -> str:
        """The shell command that runs slurmddp on the host."""
        if self.python:
            return shlex.join([self.python, "-m", "slurmddp"])
        return "slurmddp"


def proof_of(nonce: str) -> str:
    """Return the proof for a nonce: a hash, because a program that echoes its arguments must not pass."""
    return hashlib.sha256(f"slurmddp {nonce}".encode()).hexdigest()[:32]


def _end_of(nonce: str) -> str:
    """Return the beginning of the last line, which the shell on the host prints before the exit code."""
    return json.dumps({"ended": nonce})[:-1] + ', "code": '


def answer_line(proof: str, **facts: Any) -> str:
    """Return a line of output that is meant for the laptop, not for a person."""
    return json.dumps({_PROOF: proof, **facts})


class Exchange:
    """A request to slurmddp on a host, and its answer.

    Attributes:
        node: the host.
        version: the version of slurmddp on the host; empty before the proof.
    """

    def __init__(
        self,
        node: LoginNode,
        process: subprocess.Popen[bytes],
        nonce: str,
        report: Report,
        messages: HostMessages,
        *,
        changes: bool,
    ) -> None:
        self.node = node
        self._report = report
        self._messages = messages
        self._changes = changes
        self.version = ""
        self._code: int | None = None
        self._process = process
        self._stdin = cast("IO[bytes]", process.stdin)
        self._stdout = cast("IO[bytes]", process.stdout)
        self._proof = proof_of(nonce)
        self._end = _end_of(nonce)

    def read_proof(self) -> None:
        """Wait for the proof that slurmddp runs.

        Raises:
            LoginNodeError: the host can't be reached, or slurmddp does not run there.
        """
        greeted = 0
        for line, facts in self._answers(_PIECE_BYTES):
            if facts is not None:
                self.version = str(facts["version"])
                return

            self._report(HostGreeting(line))
            greeted += len(line)
            if greeted > _MAX_GREETING_BYTES:
                raise LoginNodeError(
                    f"{self.node.host} prints endless output before it runs slurmddp. Nothing was done.",
                    hint=f"`{shlex.join(['ssh', self.node.host, 'true'])}` must end, and print little.",
                )

        raise self._silence()

    def send(self, content: bytes) -> None:
        """Send further bytes after the request."""
        # The exit code of ssh will show why the pipe is closed.
        with suppress(BrokenPipeError):
            self._stdin.write(content)
            self._stdin.flush()

    def end_of_input(self) -> None:
        """Close the input of the host, after the last byte."""
        with suppress(BrokenPipeError):
            self._stdin.close()

    def facts(self) -> dict[str, Any]:
        """Return the next facts that the host sends; report output before them.

        Raises:
            LoginNodeError: the connection broke, or slurmddp on the host ended without an answer.
            SlurmddpError: the error that slurmddp on the host raised.
        """
        for line, facts in self._answers():
            if facts is not None:
                return facts
            self._report(HostOutput(line))

        ended = f"slurmddp on {self.node.host} ended without an answer (exit code {self.exit_code()})"
        raise self._error(ended, hint=self._hint_for_version())

    def lines(self) -> Iterator[tuple[str, dict[str, Any] | None]]:
        """Yield each line of output with None, or an empty line with facts that the host sent.

        Raises:
            LoginNodeError: the connection broke.
            SlurmddpError: the error that slurmddp on the host raised.
        """
        return self._answers()

    def read(self, size: int) -> bytes:
        """Return the next bytes of the output.

        Raises:
            LoginNodeError: the connection broke before all bytes had arrived.
        """
        content = self._stdout.read(size)
        if len(content) < size:
            raise self._broken()
        return content

    def exit_code(self) -> int:
        """Wait for the end of the command on the host, and return its exit code.

        Raises:
            LoginNodeError: the connection broke.
        """
        for _ in self._answers():
            pass

        try:
            code = self._process.wait(None if self._code is None else _LINGER_S)
        except subprocess.TimeoutExpired:
            return cast("int", self._code)

        if code == _UNREACHABLE or code < 0:
            raise self._broken()
        return code

    def _answers(self, limit: int = -1) -> Iterator[tuple[str, dict[str, Any] | None]]:
        """Yield lines or facts; split lines that are longer than `limit` bytes."""
        mark = json.dumps({_PROOF: self._proof})[:-1]
        while self._code is None and (raw := self._stdout.readline(limit)):
            line, ended, code = raw.decode(errors="replace").partition(self._end)
            if ended:
                self._code = int(code.rstrip("}\n") or _UNREACHABLE)
                if not line:
                    break

            before, marked, rest = line.partition(mark)
            if not marked:
                yield line, None
                continue
            if before:
                # A greeting without a line break.
                yield f"{before}\n", None

            try:
                facts = json.loads(f"{mark}{rest}")
            except ValueError:
                # The connection broke within the line.
                raise self._broken() from None

            if "error" in facts:
                raise error_from_json(facts["error"])

            yield "", facts

    def _broken(self) -> LoginNodeError:
        """Return the error for a connection that broke or could not be opened."""
        host = self.node.host
        again = "Run the command again."
        if not self.version:
            works = f"`{shlex.join(['ssh', *_batch(), host, 'true'])}` must work first."
            unreached = f"{host} can't be reached by ssh, or the connection broke"
            return self._error(unreached, then="Nothing was done.", hint=works)

        broke = f"The connection to {host} broke"
        if not self._changes:
            return self._error(broke, hint=again)
        if not self._stdin.closed:
            # The host did not get the whole request.
            return self._error(broke, then="Nothing was started.", hint=again)
        return self._error(
            broke,
            then="If the command had begun on the host, it continues.",
            hint="The same command finds a run that was started; only `slurmddp rerun` starts a second run.",
        )

    def _error(self, what: str, *, then: str = "", hint: str) -> LoginNodeError:
        """Return an error that quotes the last line of ssh or the host, which usually contains the cause."""
        last_line = self._messages.last_line()
        sentence = f"{what}: {last_line}." if last_line else f"{what}."
        error = LoginNodeError(f"{sentence} {then}".rstrip(), hint=hint)
        error.last_line = last_line

        return error

    def _hint_for_version(self) -> str:
        """Return the hint to install the same version on the host; empty if it has this version."""
        if self.version == __version__:
            return ""
        return f"{self.node.host} has slurmddp {self.version}: install slurmddp {__version__} on it."

    def _silence(self) -> LoginNodeError:
        """Return the error for a host that ended without the proof."""
        host = self.node.host
        program = self.node.program
        code = self.exit_code()
        if code == 0:
            return LoginNodeError(
                f"{host} did not run `{program}`, though its shell reports success: a profile of the shell "
                f"replaces or ends it, or `{program}` is another program. Nothing was done.",
                hint="Restrict lines such as `exec fish` or `exit` in ~/.bash_profile (or ~/.profile, "
                "~/.bashrc) to interactive shells: case $- in *i*) exec fish;; esac",
            )

        return self._error(
            f"{host} can't run `{program}` (exit code {code})",
            then="Nothing was done.",
            hint=f"Install it on {host} (pip install slurmddp=={__version__}), and set its interpreter in "
            "the cluster file: python: /path/to/python. No shell profile may replace or end the shell.",
        )


@contextmanager
def exchange(
    node: LoginNode,
    request: Mapping[str, Any],
    *,
    more_input: bool = False,
    silent: bool = False,
    quiet: bool = False,
    timeout_s: float | None = None,
    report: Report = ignore,
) -> Iterator[Exchange]:
    """Run slurmddp on a host with a request, and yield the exchange once slurmddp has proved that it runs.

    At the end of the context, a command that still runs on the host loses its connection.

    Args:
        node: the host.
        request: the request (see `serve`).
        more_input: whether bytes follow the request.
        silent: whether ssh must ask for no password, even on a terminal.
        quiet: whether to hide the messages of ssh and of the host. An error quotes the last one in any case.
        timeout_s: seconds after which the connection is cut; None: no limit.
        report: called with `HostGreeting` for the output of profiles, `HostSilent` if the host is slow, and
            `HostOutput`.

    Raises:
        LoginNodeError: the host can't be reached, or it can't run slurmddp; nothing was done.
    """
    nonce = secrets.token_hex(16)
    command = [*ssh_command(silent=silent), "--", node.host, _line(node, nonce)]
    sys.stdout.flush()
    messages = HostMessages(quiet=quiet)

    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages.descriptor
        )
    finally:
        # Also after a failed start: it closes this process's copy of the writing end.
        messages.begin()

    with process:
        session = Exchange(node, process, nonce, report, messages, changes=bool(request.get("changes")))
        timer = threading.Timer(timeout_s or 0, process.kill)
        try:
            if timeout_s is not None:
                timer.start()

            session.send(base64.b64encode(json.dumps(request).encode()) + b"\n" + END_OF_REQUEST)
            if not more_input:
                session.end_of_input()

            with _answered_in_time(node.host, process, report):
                session.read_proof()

            yield session
        finally:
            timer.cancel()
            session.end_of_input()
            if process.poll() is None:
                # Nobody reads the rest of the answer.
                process.terminate()

    messages.end()


@contextmanager
def _answered_in_time(host: str, process: subprocess.Popen[bytes], report: Report) -> Iterator[None]:
    """Kill ssh if the block takes minutes: a profile that reads all input would wait for ever."""
    timers = [
        threading.Timer(_NOTE_S, report, [HostSilent(host, _NOTE_S)]),
        threading.Timer(_ANSWER_S, process.kill),
    ]
    for timer in timers:
        timer.daemon = True
        timer.start()

    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def ssh_command(*, silent: bool = False) -> list[str]:
    """Return the ssh command with the options of every connection."""
    # RemoteCommand and RequestTTY in ~/.ssh/config are meant for interactive sessions.
    options = ["-T", "-o", "RemoteCommand=none", "-o", f"ConnectTimeout={_CONNECT_S}"]
    return ["ssh", *options, *_batch(silent=silent)]


def _batch(*, silent: bool = False) -> list[str]:
    """Return the option with which ssh asks for no password; none if a person at a terminal may answer."""
    may_ask = not silent and sys.stdin is not None and sys.stdin.isatty()
    return [] if may_ask else ["-o", "BatchMode=yes"]


def _line(node: LoginNode, nonce: str) -> str:
    """Return the shell command that runs slurmddp in a login shell of bash, whose profile sets the PATH.

    The account's own shell reads this command. sh, bash, zsh, fish, tcsh and others parse a text in single
    quotes alike if it has no quotes, backslashes, exclamation marks or line breaks, so it is encoded.
    """
    # Profiles get no input, and their output goes to stderr, so that request and answer stay intact.
    # Profiles may use the descriptors 3 to 9; bash itself uses those from 10 up and from 63 down.
    inner = f"exec <&198 >&199 199>&- 198<&-; exec {node.program} {FLAG} {nonce}"
    end = f"printf '{_end_of(nonce)}%d}}\\n' $code"
    script = f"bash -lc {shlex.quote(inner)} 199>&1 198<&0 >&2 </dev/null; code=$?; {end}; exit $code"
    encoded = base64.b64encode(script.encode()).decode()

    # sh can't redirect descriptors of three digits, bash can. With -p, bash reads no startup file here.
    return f"bash -p -c 'eval \"$(echo {encoded} | base64 -d)\"'"
