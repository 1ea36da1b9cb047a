"""One exchange with slurmddp on a login node, by the user's own ssh.

The far side first proves by a nonce that slurmddp runs: the exit code of a shell proves nothing. The request
travels on standard input, so that no login shell reads it and no list of processes shows it.
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
from slurmddp.control.contract import error_from_json
from slurmddp.control.events import HostGreeting, HostOutput, HostSilent, Report, ignore
from slurmddp.control.ssh.host_messages import HostMessages
from slurmddp.errors import LoginNodeError

FLAG = "--over-ssh"
"""The hidden flag by which slurmddp on the host serves one request (see `serve`)."""
END_OF_REQUEST = b"exit 68\n"
"""The line after the request. A shell that took the place of slurmddp reads it, and ends."""
_PROOF = "proof"
_CONNECT_S = 20
"""Seconds for which ssh waits for the host."""
_NOTE_S = 30.0
"""Seconds without an answer after which a note says what may hold it up."""
_ANSWER_S = 300.0
"""Seconds for which the answer is awaited: a person may have to log in, and a profile may be slow."""
_PIECE_BYTES = 1 << 20
_MOST_GREETING_BYTES = 1 << 28
"""Bytes that the shells and profiles of a host may print before slurmddp runs there: 256 MB."""
_UNREACHABLE = 255
"""Exit code of ssh for its own failures."""
_LINGER_S = 1.0
"""Seconds that ssh gets after the end of the command to pass its last messages on.

A program that a profile has started in the background, such as ssh-agent, keeps the connection open.
"""


@dataclass(frozen=True, kw_only=True)
class LoginNode:
    """The place where commands run: a host, the project's folder on it, and its interpreter."""

    host: str
    folder: str
    python: str | None = None

    @property
    def program(self) -> str:
        """The command that runs slurmddp on the host, as a line of shell."""
        return shlex.join([self.python, "-m", "slurmddp"] if self.python else ["slurmddp"])


def proof_of(nonce: str) -> str:
    """Return the proof that slurmddp has read a nonce; a program that repeats its words gives none."""
    return hashlib.sha256(f"slurmddp {nonce}".encode()).hexdigest()[:32]


def _end_of(nonce: str) -> str:
    """Return the text before the exit code in the last line, which the shell on the host prints."""
    return json.dumps({"ended": nonce})[:-1] + ', "code": '


def answer_line(proof: str, **facts: Any) -> str:
    """Return a line by which the host speaks to the laptop, not to a person."""
    return json.dumps({_PROOF: proof, **facts})


class Exchange:
    """A request to slurmddp on a host, and its answer.

    Attributes:
        version: the version of slurmddp on the host.
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
            if greeted > _MOST_GREETING_BYTES:
                raise LoginNodeError(
                    f"{self.node.host} prints without an end before it runs slurmddp. Nothing was done.",
                    hint=f"`{shlex.join(['ssh', self.node.host, 'true'])}` must print little, and end.",
                )
        raise self._silence()

    def send(self, content: bytes) -> None:
        """Send further bytes after the request."""
        with suppress(BrokenPipeError):  # The exit code of ssh says why.
            self._stdin.write(content)
            self._stdin.flush()

    def end_of_input(self) -> None:
        """Say that no more bytes follow."""
        with suppress(BrokenPipeError):
            self._stdin.close()

    def facts(self) -> dict[str, Any]:
        """Return the facts that the host sends next.

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
        """Yield each line of output, or the facts that the host sent in its place.

        Raises:
            LoginNodeError: the connection broke.
            SlurmddpError: the error that slurmddp on the host raised.
        """
        return self._answers()

    def read(self, size: int) -> bytes:
        """Return the next bytes of the output.

        Raises:
            LoginNodeError: the connection broke before all of them had arrived.
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

    def _answers(self, most: int = -1) -> Iterator[tuple[str, dict[str, Any] | None]]:
        """Yield lines or facts; of a line that is longer than `most` bytes, pieces."""
        mark = json.dumps({_PROOF: self._proof})[:-1]
        while self._code is None and (raw := self._stdout.readline(most)):
            line, ended, code = raw.decode(errors="replace").partition(self._end)
            if ended:
                self._code = int(code.rstrip("}\n") or _UNREACHABLE)
                if not line:
                    break

            before, marked, rest = line.partition(mark)
            if not marked:
                yield line, None
                continue
            if before:  # A greeting without a line break.
                yield f"{before}\n", None
            try:
                facts = json.loads(f"{mark}{rest}")
            except ValueError:  # The line broke off.
                raise self._broken() from None
            if "error" in facts:
                raise error_from_json(facts["error"])
            yield "", facts

    def _broken(self) -> LoginNodeError:
        """Return the error for a connection that broke, or never stood."""
        host, again = self.node.host, "Type the command again."
        if not self.version:
            works = f"`{shlex.join(['ssh', *_batch(), host, 'true'])}` must work without slurmddp."
            unreached = f"{host} can't be reached by ssh, or the connection broke"
            return self._error(unreached, then="Nothing was done.", hint=works)
        broke = f"The connection to {host} broke"
        if not self._changes:
            return self._error(broke, hint=again)
        if not self._stdin.closed:  # The host has not got the whole request.
            return self._error(broke, then="Nothing was started.", hint=again)
        return self._error(
            broke,
            then="If the command had begun there, it goes on.",
            hint="The same command again finds what was started; only `slurmddp rerun` starts another run.",
        )

    def _error(self, what: str, *, then: str = "", hint: str) -> LoginNodeError:
        """Return an error with the last line of ssh or the host, which says why."""
        last_line = self._messages.last_line()
        sentence = f"{what}: {last_line}." if last_line else f"{what}."
        error = LoginNodeError(f"{sentence} {then}".rstrip(), hint=hint)
        error.last_line = last_line
        return error

    def _hint_for_version(self) -> str:
        """Return what to do about a host that does not understand this machine."""
        if self.version == __version__:
            return ""
        return f"{self.node.host} has slurmddp {self.version}: install {__version__} there as well."

    def _silence(self) -> LoginNodeError:
        """Return the error for a command that ended without the proof."""
        host, program, code = self.node.host, self.node.program, self.exit_code()
        if code == 0:
            return LoginNodeError(
                f"{host} did not run `{program}`, though its shell reports success: the profile of {host} "
                f"replaces or ends the shell, or `{program}` is another program. Nothing was done.",
                hint="Let a line such as `exec fish` or `exit` in ~/.bash_profile (or ~/.profile, ~/.bashrc) "
                "run in interactive shells alone: case $- in *i*) exec fish;; esac",
            )
        return self._error(
            f"{host} can't run `{program}` (exit code {code})",
            then="Nothing was done.",
            hint=f"Install it there (pip install slurmddp=={__version__}), and name its interpreter in the "
            "cluster file: python: /path/to/python. No profile there may replace or end the shell.",
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

    At the end of the context a command that still runs there loses its connection.

    Args:
        node: the host.
        request: what the host has to do (see `serve`).
        more_input: whether bytes follow the request.
        silent: whether ssh asks nothing, although there is a terminal.
        quiet: whether the messages of ssh and of the host are not passed on to stderr; an error holds the
            last of them in any case.
        timeout_s: seconds after which the connection is cut; None: none.
        report: called with a `HostGreeting` for what profiles print, `HostSilent` if the host is slow, and
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
            if process.poll() is None:  # Nobody reads its answer any more.
                process.terminate()
    messages.end()


@contextmanager
def _answered_in_time(host: str, process: subprocess.Popen[bytes], report: Report) -> Iterator[None]:
    """End ssh if the host gives no answer for minutes: a profile that reads all input would wait for ever."""
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
    """Return ssh with the options of every connection."""
    # A RemoteCommand or RequestTTY of ~/.ssh/config is meant for sessions of a person.
    options = ["-T", "-o", "RemoteCommand=none", "-o", f"ConnectTimeout={_CONNECT_S}"]
    return ["ssh", *options, *_batch(silent=silent)]


def _batch(*, silent: bool = False) -> list[str]:
    """Return the option with which ssh asks nothing; without a terminal nobody could answer."""
    asks = not silent and sys.stdin is not None and sys.stdin.isatty()
    return [] if asks else ["-o", "BatchMode=yes"]


def _line(node: LoginNode, nonce: str) -> str:
    """Return the line that runs slurmddp in a login shell of bash, whose profile sets the PATH.

    The account's own shell reads the line: sh, bash, zsh, fish, tcsh and others agree on what a text in
    single quotes means if it has no quotes, backslashes, exclamation marks or line breaks.
    """
    # The profile gets no input, and its output goes to stderr: the request and the answer stay whole.
    # Profiles use the descriptors 3 to 9 themselves, and bash those from 10 on and from 63 down.
    inner = f"exec <&198 >&199 199>&- 198<&-; exec {node.program} {FLAG} {nonce}"
    end = f"printf '{_end_of(nonce)}%d}}\\n' $code"
    script = f"bash -lc {shlex.quote(inner)} 199>&1 198<&0 >&2 </dev/null; code=$?; {end}; exit $code"
    encoded = base64.b64encode(script.encode()).decode()
    # sh has no descriptors of three digits; with -p bash reads no file of its own first.
    return f"bash -p -c 'eval \"$(echo {encoded} | base64 -d)\"'"
