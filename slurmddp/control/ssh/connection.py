"""Send one request to slurmddp on a login node, over the user's own ssh.

slurmddp on the host first proves with a nonce that it runs, because the exit code of ssh may come from a
shell. The request is sent on standard input, so that it appears in no list of processes.
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
from slurmddp.control.ssh.error_encoding import error_from_json
from slurmddp.control.ssh.host_stderr import HostMessages
from slurmddp.errors import LoginNodeError

FLAG = "--over-ssh"
"""The hidden flag by which slurmddp on the host serves one request (see `serve`)."""
END_OF_REQUEST = b"exit 68\n"
"""The line after the request. A shell that reads the input in place of slurmddp executes it, and so ends."""
_PROOF = "proof"
"""The JSON key of the proof, in output lines that are answers for the laptop."""
_CONNECT_S = 20
"""Seconds for which ssh waits until the connection is established."""
_NOTE_S = 30.0
"""Seconds without an answer after which a note names likely causes."""
_ANSWER_S = 300.0
"""Seconds to wait for the proof: a person may have to enter a password, and a profile may be slow."""
_PIECE_BYTES = 1 << 20
_MAX_GREETING_BYTES = 1 << 28
"""The largest number of bytes that shell profiles of a host may print before slurmddp runs (256 MiB)."""
_UNREACHABLE = 255
"""Exit code of ssh if ssh itself fails, for example because it can't connect."""
_LINGER_S = 1.0
"""Seconds that ssh gets after the end of the command to pass on its last messages.

ssh itself may never end: a program that a profile starts in the background, such as ssh-agent, keeps the
connection open.
"""


@dataclass(frozen=True, kw_only=True)
class LoginNode:
    """A login node: the ssh host, the project's folder on it, and the Python interpreter with slurmddp."""

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
    """Return the text with which slurmddp on the host proves that it, and no other program, received a nonce.

    It is a hash, because another program may print its arguments, and so the nonce.
    """
    return hashlib.sha256(f"slurmddp {nonce}".encode()).hexdigest()[:32]


def _end_of(nonce: str) -> str:
    """Return the beginning of the last line of output, a JSON object; the exit code follows.

    The shell on the host prints the line after slurmddp has ended.
    """
    return json.dumps({"ended": nonce})[:-1] + ', "code": '


def answer_line(proof: str, **facts: Any) -> str:
    """Return a line of output for slurmddp on the laptop: a JSON object with the proof and `facts`."""
    return json.dumps({_PROOF: proof, **facts})


class Exchange:
    """A running slurmddp on a login node, its input, and its output: lines for a person, and JSON answers.

    Attributes:
        node: the login node.
        version: the version of slurmddp on the host; empty until `read_proof` has returned.
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
        """Wait until slurmddp on the host has proved that it runs; report earlier lines as `HostGreeting`.

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
        """Send bytes to slurmddp on the host; nothing is raised if the connection is broken."""
        # ssh has ended. `exit_code`, or the next read of an answer, raises an error with the cause.
        with suppress(BrokenPipeError):
            self._stdin.write(content)
            self._stdin.flush()

    def end_of_input(self) -> None:
        """Close the input of slurmddp on the host, so that it reads the end of the file."""
        with suppress(BrokenPipeError):
            self._stdin.close()

    def facts(self) -> dict[str, Any]:
        """Return the next JSON answer of the host; report lines before it as `HostOutput`.

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
        """Yield (line, None) for each line of output, and ("", answer) for each JSON answer of the host.

        Raises:
            LoginNodeError: the connection broke.
            SlurmddpError: the error that slurmddp on the host raised.
        """
        return self._answers()

    def read(self, size: int) -> bytes:
        """Read exactly `size` bytes of output, such as the content of a file.

        Raises:
            LoginNodeError: the connection broke before all bytes had arrived.
        """
        content = self._stdout.read(size)
        if len(content) < size:
            raise self._broken()
        return content

    def exit_code(self) -> int:
        """Discard the rest of the output, wait for the end of the command, and return its exit code.

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
        """Yield lines and JSON answers as `lines` does; store the exit code that the last line contains.

        Args:
            limit: bytes after which a line is split; -1: never.
        """
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
                # A profile printed this text without a line break, so the answer follows on the same line.
                yield f"{before}\n", None

            try:
                facts = json.loads(f"{mark}{rest}")
            except ValueError:
                # The answer is no complete JSON object, because the connection broke within the line.
                raise self._broken() from None

            if "error" in facts:
                raise error_from_json(facts["error"])

            yield "", facts

    def _broken(self) -> LoginNodeError:
        """Return the error for a connection that broke or was never established.

        Its message says whether the command was started on the host, and whether it continues.
        """
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
            # The input is still open, so the host has not got all of it, and starts nothing before that.
            return self._error(broke, then="Nothing was started.", hint=again)
        return self._error(
            broke,
            then="If the command had begun on the host, it continues.",
            hint="The same command finds a run that was started; only `slurmddp rerun` starts a second run.",
        )

    def _error(self, what: str, *, then: str = "", hint: str) -> LoginNodeError:
        """Return an error that quotes the last line on stderr, which usually contains the cause.

        Args:
            what: a clause about the failure; the quoted line of stderr follows it.
            then: a sentence about the consequence; empty for no sentence.
            hint: advice to the person.
        """
        last_line = self._messages.last_line()
        sentence = f"{what}: {last_line}." if last_line else f"{what}."
        error = LoginNodeError(f"{sentence} {then}".rstrip(), hint=hint)
        error.last_line = last_line

        return error

    def _hint_for_version(self) -> str:
        """Return the advice to install this version on the host; empty if the host has it."""
        if self.version == __version__:
            return ""
        return f"{self.node.host} has slurmddp {self.version}: install slurmddp {__version__} on it."

    def _silence(self) -> LoginNodeError:
        """Return the error for a shell on the host that ended without the proof that slurmddp runs."""
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
    """Send a request to slurmddp on a login node over ssh, and yield the connection.

    The block begins once slurmddp has proved that it runs. At the end of the block, ssh is terminated if it
    still runs.

    Args:
        node: the login node.
        request: the request (see `serve`).
        more_input: whether the block sends bytes after the request.
        silent: whether ssh must not ask for a password, even on a terminal.
        quiet: whether to hide what ssh and the host print on stderr. An error quotes the last line in any
            case.
        timeout_s: seconds after which the connection is cut; None: no limit.
        report: called with `HostGreeting` for the output of profiles, `HostSilent` if the host has not
            answered after `_NOTE_S` seconds, and `HostOutput`.

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
        # Called even if ssh could not be started: it closes this process's copy of the pipe's writing end, so
        # that the thread that reads the pipe can end.
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
                # The block has not read all of the output, so ssh may not end by itself.
                process.terminate()

    messages.end()


@contextmanager
def _answered_in_time(host: str, process: subprocess.Popen[bytes], report: Report) -> Iterator[None]:
    """Report `HostSilent` if the block takes `_NOTE_S` seconds, and kill ssh if it takes `_ANSWER_S` seconds.

    Without this, a profile on the host that reads all input would let the block wait for ever.
    """
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
    """Return the ssh command with the options for every connection, without the host.

    Args:
        silent: whether ssh must not ask for a password, even on a terminal.
    """
    # -T and RemoteCommand=none override RequestTTY and RemoteCommand in ~/.ssh/config, which a person may
    # have set for interactive sessions.
    options = ["-T", "-o", "RemoteCommand=none", "-o", f"ConnectTimeout={_CONNECT_S}"]
    return ["ssh", *options, *_batch(silent=silent)]


def _batch(*, silent: bool = False) -> list[str]:
    """Return ssh's option not to ask for a password; empty if a person at a terminal may answer."""
    may_ask = not silent and sys.stdin is not None and sys.stdin.isatty()
    return [] if may_ask else ["-o", "BatchMode=yes"]


def _line(node: LoginNode, nonce: str) -> str:
    """Return the shell command that runs slurmddp in a login shell of bash, whose profile sets the PATH.

    The login shell of the account parses this command first, and may be any shell. So the script for bash is
    encoded as base64: sh, bash, zsh, fish and tcsh parse a text in single quotes alike if it has no quotes,
    backslashes, exclamation marks or line breaks.
    """
    # While profiles run, stdin is /dev/null and stdout is stderr, so that they neither read the request nor
    # print into the answer. The real stdin and stdout are kept as descriptors 198 and 199: profiles may use 3
    # to 9, and bash itself uses those from 10 up and from 63 down.
    inner = f"exec <&198 >&199 199>&- 198<&-; exec {node.program} {FLAG} {nonce}"
    end = f"printf '{_end_of(nonce)}%d}}\\n' $code"
    script = f"bash -lc {shlex.quote(inner)} 199>&1 198<&0 >&2 </dev/null; code=$?; {end}; exit $code"
    encoded = base64.b64encode(script.encode()).decode()

    # The script runs in bash, because sh can't redirect descriptors of three digits. With -p, this outer bash
    # reads no startup file.
    return f"bash -p -c 'eval \"$(echo {encoded} | base64 -d)\"'"
