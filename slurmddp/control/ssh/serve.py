"""The host's side of an exchange: prove that slurmddp runs, read the request, take the code, and serve it.

A request is a dictionary, which arrives as base64 on standard input:

    folder      the project's folder, absolute or relative to the home
    words       the command line to run there
    action      in place of words: the import path of an action of `slurmddp.control`, whose result is wanted
    arguments   of the action: a list; `keywords`: a dictionary
    files       in place of words: paths of files whose contents are wanted
    unshared    whether to refuse files to which other accounts can write
    terminal    variables that describe the laptop's terminal; null: the output goes to a file or a pipe
    changes     whether runs are started or changed, so that the work goes on if the connection breaks
    version     the version of the laptop; code of another version is not taken
    code        the files of the project (`sent_code`), whose contents follow; null: the code was sent before
"""

from __future__ import annotations

import base64
import io
import json
import os
import select
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any, TextIO

from slurmddp import __version__
from slurmddp.control.contract import error_to_json, to_json
from slurmddp.control.events import Report, ignore
from slurmddp.control.ssh import code
from slurmddp.control.ssh.connection import END_OF_REQUEST, answer_line, proof_of
from slurmddp.environments.names import OVER_SSH_VARIABLE
from slurmddp.errors import (
    EXIT_FINISHED,
    EXIT_LOGIN_NODE,
    ConfigError,
    LoginNodeError,
    RunNotFoundError,
    SlurmddpError,
    unreadable,
)
from slurmddp.host.regular_file import open_regular
from slurmddp.runs import ssh_runs
from slurmddp.runs.folder import sent_code
from slurmddp.runs.folder.owner import account

_BEGINNING = base64.b64encode(b'{"a')[:2]
"""The beginning of each request: of an object in JSON, as base64."""


def serve(nonce: str, command_line: Callable[[Sequence[str]], int], report: Report = ignore) -> int:
    """Serve the one request on standard input.

    Args:
        nonce: a random text, which is proved to be read.
        command_line: runs the words of a command line.
        report: called with `Waiting` and `Note` while code arrives.

    Returns:
        The exit code. An error of slurmddp is sent to the laptop, which raises it.
    """
    answer = partial(_answer, proof_of(nonce))
    answer(version=__version__)
    source = _take_over_stdin()
    try:
        request = _read_request(source)
        _describe_terminal(request.get("terminal"))
        if request.get("changes"):
            _outlive_the_connection()
        else:
            _interrupt_when_the_connection_ends()
        return _serve(request, source, command_line, answer, report)
    except SlurmddpError as error:
        answer(error=error_to_json(error))
        return error.exit_code


def _serve(
    request: Mapping[str, Any],
    source: IO[bytes],
    command_line: Callable[[Sequence[str]], int],
    answer: Callable[..., None],
    report: Report,
) -> int:
    """Do what a request asks for, and return the exit code.

    Raises:
        LoginNodeError: the code did not arrive whole, or this version has no such action.
        ConfigError: the folder holds files that slurmddp did not send, or a file is another account's.
        SlurmddpError: the action failed.
    """
    folder = Path.home() / request["folder"]
    if (paths := request.get("files")) is not None:
        return _send_files(paths, answer, unshared=bool(request.get("unshared")))
    with ExitStack() as stack:
        if request.get("code") is not None:
            if request["version"] != __version__:  # The laptop reports it.
                return EXIT_LOGIN_NODE
            stack.enter_context(_received_code(folder, request["code"], source, answer, report))
        action = request.get("action")
        if folder.is_dir():
            os.chdir(folder)
        elif action is None:
            raise RunNotFoundError(f"There is no folder {folder} any more.")

        ssh_runs.listener = partial(_answer_started, answer, sys.stdout)
        if action is None:
            return command_line(request["words"])
        result = _action(action)(*request["arguments"], **request["keywords"])
        answer(result=to_json(result))
        return EXIT_FINISHED


def _action(path: str) -> Callable[..., Any]:
    """Return the action at an import path; raise LoginNodeError if this version does not have it."""
    module, _, name = path.rpartition(".")
    try:
        if not module.startswith("slurmddp.control."):
            raise ImportError(f"{module} holds no actions")
        action: Callable[..., Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise LoginNodeError(
            f"slurmddp {__version__} on {socket.gethostname()} has no action {path}.",
            hint="Install the same version on both machines.",
        ) from error
    return action


@contextmanager
def _received_code(
    folder: Path,
    listed: Sequence[dict[str, Any]],
    source: IO[bytes],
    answer: Callable[..., None],
    report: Report,
) -> Iterator[None]:
    """Take the code of a submission into its folder, and keep other submissions from changing it."""
    files = sent_code.from_json(listed)
    code.open_folder(folder)
    with code.locked(folder, report):
        wanted = code.missing(folder, files)
        answer(folder=str(folder), wanted=[file.name for file in wanted])
        code.Receiver(folder, files, report).receive(source, wanted)
        answer(received=True)
        yield


def _answer(proof: str, **facts: Any) -> None:
    print(answer_line(proof, **facts), flush=True)


def _answer_started(
    answer: Callable[..., None], stdout: TextIO, names: Sequence[str], sweep: str | None
) -> None:
    with redirect_stdout(stdout):  # A command with --json sends its lines to stderr meanwhile.
        answer(started=list(names), sweep=sweep)


def _take_over_stdin() -> IO[bytes]:
    """Return the standard input as a stream of its own; commands find the end of input in its place."""
    source = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return source


def _read_request(source: IO[bytes]) -> dict[str, Any]:
    try:
        beginning = source.read(len(_BEGINNING))
        if beginning != _BEGINNING:  # Another stream, such as /dev/zero, may have no line that ends.
            raise ValueError(f"{beginning!r} begins no request")
        line = beginning + source.readline()
        request: dict[str, Any] = json.loads(base64.b64decode(line.strip(), validate=True))
    except (ValueError, OSError) as error:  # OSError: a profile has closed it, or opened it for writing.
        raise LoginNodeError(
            "No request came over ssh.", hint="A profile on this host may read the standard input."
        ) from error
    if source.readline() != END_OF_REQUEST:
        raise LoginNodeError("The request over ssh broke off.", hint="Type the command again.")
    return request


def _describe_terminal(terminal: dict[str, str] | None) -> None:
    """Let the output look as if it went to the laptop's terminal."""
    os.environ[OVER_SSH_VARIABLE] = "terminal" if terminal else "1"
    os.environ.update(terminal or {})


class _Output(io.RawIOBase):
    """A stream to a descriptor that drops what is written once its reader has left."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, content: Any) -> int:
        try:
            return os.write(self._descriptor, content)
        except BrokenPipeError:
            return len(content)


def _outlive_the_connection() -> None:
    """Let this process go on without its reader: jobs that are not queued or cancelled yet have to be."""
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_Output(stream.fileno())), errors="backslashreplace", line_buffering=True
        )
        for stream in (sys.stdout, sys.stderr)
    )


def _interrupt_when_the_connection_ends() -> None:
    """Interrupt this process, as Ctrl-C does, once nobody reads its output: it may wait for hours."""
    # A program that a script started in its background has inherited SIGINT as ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hang_up = select.poll()
    hang_up.register(sys.stdout.fileno(), 0)  # Errors and the end are reported without being asked for.

    def wait() -> None:
        hang_up.poll()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


def _send_files(paths: Sequence[str], answer: Callable[..., None], *, unshared: bool) -> int:
    """Send the contents of files of this account; a missing file has no size."""
    contents = [_own_content(Path(path), unshared=unshared) for path in paths]
    answer(sizes=[None if content is None else len(content) for content in contents])
    for content in contents:
        sys.stdout.buffer.write(content or b"")
    sys.stdout.flush()
    return EXIT_FINISHED


def _own_content(path: Path, *, unshared: bool) -> bytes | None:
    """Return the content of a file of this account; None if there is no such file.

    Raises:
        ConfigError: another account owns the file, or can write to it although it has to be `unshared`.
        SlurmddpError: the file can't be read.
    """
    try:
        stream = open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(path, error) from error
    with stream:
        status = os.fstat(stream.fileno())
        if status.st_uid != os.geteuid():
            raise ConfigError(f"{path} belongs to {account(status.st_uid)}, so it is not read.")
        if unshared and status.st_mode & 0o022:
            raise ConfigError(
                f"{path} is writable for other accounts, who may have put code into it. It was not read.",
                hint=f"If you trust its content: chmod go-w {shlex.quote(str(path))}",
            )
        return stream.read()
