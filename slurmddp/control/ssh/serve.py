"""Serve a request on the login node: prove that slurmddp runs, read the request, receive code, run a command.

A request is a JSON object, which arrives as base64 on standard input:

    folder      the project's folder, absolute or relative to the home directory
    words       the command line to run in the folder
    action      in place of words: the import path of an action of `slurmddp.control` to call
    arguments   the positional arguments of the action, a list
    keywords    the keyword arguments of the action, an object
    files       in place of words: paths of files whose contents to send
    unshared    whether to refuse files that other accounts can change
    terminal    variables that describe the laptop's terminal; null: the output goes to a file or a pipe
    changes     whether runs are started or changed, so that the work continues if the connection breaks
    version     the version of slurmddp on the laptop; code of another version is refused
    code        the files of the project (`sent_code`), whose contents follow; null: no code follows
"""

from __future__ import annotations

import base64
import io
import json
import os
import select
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
from slurmddp.control.events import Report, ignore
from slurmddp.control.json_encoding import to_json
from slurmddp.control.ssh import receive_code
from slurmddp.control.ssh.connection import END_OF_REQUEST, answer_line, proof_of
from slurmddp.control.ssh.error_encoding import error_to_json
from slurmddp.environments.names import OVER_SSH_VARIABLE
from slurmddp.errors import (
    EXIT_FINISHED,
    EXIT_LOGIN_NODE,
    LoginNodeError,
    RunNotFoundError,
    SlurmddpError,
)
from slurmddp.runs import ssh_runs
from slurmddp.runs.folder import sent_code
from slurmddp.runs.folder.owner import read_own

_BEGINNING = base64.b64encode(b'{"a')[:2]
"""The first characters of each request: the beginning of a JSON object as base64."""


def serve(nonce: str, command_line: Callable[[Sequence[str]], int], report: Report = ignore) -> int:
    """Read one request from standard input, fulfil it, and print the answers.

    Args:
        nonce: a random text from the laptop; the answers contain its hash (see `proof_of`).
        command_line: a function that runs a command line of slurmddp, and returns its exit code.
        report: called with `Waiting` and `Note` while code arrives.

    Returns:
        The exit code. A SlurmddpError is not raised here, but sent to the laptop, which raises it.
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
    """Carry out a request, print the answers, and return the exit code.

    Raises:
        LoginNodeError: the code did not arrive complete, or this version has no such action.
        ConfigError: the folder holds files that slurmddp did not send, or another account owns a file.
        SlurmddpError: the action failed.
    """
    folder = Path.home() / request["folder"]
    if (paths := request.get("files")) is not None:
        return _send_files(paths, answer, unshared=bool(request.get("unshared")))

    with ExitStack() as stack:
        if request.get("code") is not None:
            if request["version"] != __version__:
                # The laptop has got this version with the proof, and raises the error itself.
                return EXIT_LOGIN_NODE
            stack.enter_context(_received_code(folder, request["code"], source, answer, report))

        action = request.get("action")
        if folder.is_dir():
            os.chdir(folder)
        elif action is None:
            raise RunNotFoundError(f"The folder {folder} does not exist any more.")

        ssh_runs.listener = partial(_answer_started, answer, sys.stdout)
        if action is None:
            return command_line(request["words"])

        result = _action(action)(*request["arguments"], **request["keywords"])
        answer(result=to_json(result))
        return EXIT_FINISHED


def _action(path: str) -> Callable[..., Any]:
    """Import the function of `slurmddp.control` that has the given import path.

    Raises:
        LoginNodeError: this version has no such function, or the path is outside of `slurmddp.control`.
    """
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
    """Receive the code of a project into a folder, and hold the lock of the folder during the block.

    The answers tell the laptop which files to send, and then that all have arrived.

    Args:
        folder: the project's folder on this host.
        listed: the files of the project, as JSON.
        source: the stream with the contents of the files.
        answer: prints an answer for the laptop.
        report: called with `Waiting` and `Note`.
    """
    files = sent_code.from_json(listed)
    receive_code.open_folder(folder)
    with receive_code.locked(folder, report):
        wanted = receive_code.missing(folder, files)
        answer(folder=str(folder), wanted=[file.name for file in wanted])
        receive_code.Receiver(folder, files, report).receive(source, wanted)
        answer(received=True)
        yield


def _answer(proof: str, **facts: Any) -> None:
    print(answer_line(proof, **facts), flush=True)


def _answer_started(
    answer: Callable[..., None], stdout: TextIO, names: Sequence[str], sweep: str | None
) -> None:
    # A command with --json redirects stdout to stderr while it starts runs, but the answer has to go to the
    # real stdout.
    with redirect_stdout(stdout):
        answer(started=list(names), sweep=sweep)


def _take_over_stdin() -> IO[bytes]:
    """Return the standard input as a new stream, and replace descriptor 0 by /dev/null.

    So no command that runs for the request reads the contents of files that follow the request.
    """
    source = os.fdopen(os.dup(0), "rb")
    null_device = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_device, 0)
    os.close(null_device)

    return source


def _read_request(source: IO[bytes]) -> dict[str, Any]:
    """Read and decode the request.

    Raises:
        LoginNodeError: the stream does not begin with a request, or the request is cut off.
    """
    try:
        beginning = source.read(len(_BEGINNING))
        # The first characters are checked before a whole line is read: another stream in place of the
        # request, such as /dev/zero, may be an endless line.
        if beginning != _BEGINNING:
            raise ValueError(f"{beginning!r} begins no request")

        line = beginning + source.readline()
        request: dict[str, Any] = json.loads(base64.b64decode(line.strip(), validate=True))
    except (ValueError, OSError) as error:
        # OSError: a profile has closed standard input, or opened it for writing.
        raise LoginNodeError(
            "No request arrived over ssh.",
            hint="Check whether a shell profile on this host reads or closes the standard input.",
        ) from error

    if source.readline() != END_OF_REQUEST:
        raise LoginNodeError("The request over ssh was cut off.", hint="Run the command again.")
    return request


def _describe_terminal(terminal: dict[str, str] | None) -> None:
    """Set environment variables so that commands format their output for the terminal of the laptop.

    Args:
        terminal: the variables that describe the terminal; None: the output goes to a file or a pipe.
    """
    os.environ[OVER_SSH_VARIABLE] = "terminal" if terminal else "1"
    os.environ.update(terminal or {})


class _Output(io.RawIOBase):
    """A stream to a descriptor; all output is discarded once the reader has closed the pipe."""

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
    """Replace stdout and stderr by streams that raise no error after the connection has broken.

    So a command that starts or cancels runs continues until all jobs are queued or cancelled.
    """
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_Output(stream.fileno())), errors="backslashreplace", line_buffering=True
        )
        for stream in (sys.stdout, sys.stderr)
    )


def _interrupt_when_the_connection_ends() -> None:
    """Start a thread that sends SIGINT to this process if the connection breaks.

    A command that only shows runs, such as `logs -f`, could otherwise run for hours without a reader.
    """
    # A shell script starts background programs with SIGINT ignored, and this process may inherit that. So the
    # default handler is set again.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hang_up = select.poll()
    # With the event mask 0, poll returns only when the reader has closed the pipe, or on an error.
    hang_up.register(sys.stdout.fileno(), 0)

    def wait() -> None:
        hang_up.poll()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


def _send_files(paths: Sequence[str], answer: Callable[..., None], *, unshared: bool) -> int:
    """Print an answer with the sizes of files, then their contents, and return the exit code.

    Args:
        paths: paths of files that this account owns. The size of a missing file is null.
        answer: prints an answer for the laptop.
        unshared: whether to refuse files that other accounts can change.
    """
    contents = [read_own(Path(path), unshared=unshared) for path in paths]
    answer(sizes=[None if content is None else len(content) for content in contents])
    for content in contents:
        sys.stdout.buffer.write(content or b"")

    sys.stdout.flush()
    return EXIT_FINISHED
