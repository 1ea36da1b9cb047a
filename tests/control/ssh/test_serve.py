"""The host's side: a command whose reader has gone ends, unless it starts or changes runs."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.control.ssh.connection import END_OF_REQUEST, proof_of
from slurmddp.errors import EXIT_LOGIN_NODE

PROGRAM = """
import sys, time
from pathlib import Path
from slurmddp.control.ssh.serve import serve

def command_line(words):
    print("begun", flush=True)
    release = Path(words[0])
    while not release.exists():
        time.sleep(0.02)
    for stream in (sys.stdout, sys.stderr):
        print("what nobody reads", file=stream, flush=True)
    release.with_name("completed").touch()
    return 0

sys.exit(serve("nonce", command_line))
"""


@pytest.mark.parametrize("changes", [False, True])
def test_a_reader_ends_with_its_connection_and_a_submission_does_not(tmp_path: Path, changes: bool):
    request = {"folder": str(tmp_path), "words": [str(tmp_path / "release")], "changes": changes}
    # As in the background of a script, where SIGINT is ignored.
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(base64.b64encode(json.dumps(request).encode()) + b"\n" + END_OF_REQUEST)
    process.stdin.flush()
    proof = json.loads(process.stdout.readline())
    assert proof["proof"] == proof_of("nonce")
    assert process.stdout.readline() == b"begun\n"
    process.stdout.close()
    if not changes:
        assert b"KeyboardInterrupt" in process.stderr.read()
    process.stderr.close()
    (tmp_path / "release").touch()
    process.stdin.close()
    process.wait()
    assert (tmp_path / "completed").exists() == changes


@pytest.mark.parametrize(
    ("mode", "unshared", "refusal"),
    [(0o644, True, b""), (0o666, True, b"is writable for everybody"), (0o666, False, b"")],
)
def test_files_are_sent_unless_others_may_have_written_them(
    tmp_path: Path, mode: int, unshared: bool, refusal: bytes
):
    (tmp_path / "result.pkl").write_bytes(b"ab\ncd")
    (tmp_path / "result.pkl").chmod(mode)
    paths = [str(tmp_path / name) for name in ("result.pkl", "none", "result.pkl/none")]
    request = {"folder": str(tmp_path), "files": paths, "unshared": unshared}
    sent = base64.b64encode(json.dumps(request).encode()) + b"\n" + END_OF_REQUEST
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=sent, capture_output=True, check=False)
    if refusal:
        assert refusal in done.stdout and b"ab\ncd" not in done.stdout
    else:
        assert done.stdout.endswith(b'"sizes": [5, null, null]}\nab\ncd')


@pytest.mark.parametrize("sent", [b"", b"read by a profile\n", b"e30=\n"])
def test_a_request_that_is_not_whole_is_refused(tmp_path: Path, sent: bytes):
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=sent, capture_output=True, check=False)
    assert done.returncode == EXIT_LOGIN_NODE and b"LoginNodeError" in done.stdout


def test_an_input_that_can_not_be_read_is_refused() -> None:
    with Path("/dev/null").open("wb") as written:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], stdin=written, capture_output=True, check=False
        )
    assert done.returncode == EXIT_LOGIN_NODE and b"No request arrived over ssh" in done.stdout


def test_an_input_without_an_end_is_refused_at_once() -> None:
    """A profile may put /dev/zero in the place of the standard input."""
    with Path("/dev/zero").open("rb") as source:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], stdin=source, capture_output=True, check=False, timeout=60
        )
    assert done.returncode == EXIT_LOGIN_NODE and b"No request arrived over ssh" in done.stdout


def test_only_actions_of_slurmddp_are_called(tmp_path: Path) -> None:
    request = {
        "folder": str(tmp_path),
        "action": "os.mkdir",
        "arguments": [str(tmp_path / "made")],
        "keywords": {},
    }
    sent = base64.b64encode(json.dumps(request).encode()) + b"\n" + END_OF_REQUEST
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=sent, capture_output=True, check=False)
    assert done.returncode == EXIT_LOGIN_NODE and b"has no action os.mkdir" in done.stdout
    assert not (tmp_path / "made").exists()
