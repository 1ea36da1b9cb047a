"""The end of a rank: a failure keeps its exit code, and its error is in the log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import os, sys
from pathlib import Path
from slurmddp.launchers.agent.worker import RankSpec, be_rank
folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
start = RankSpec(
    local_rank=0, environ={"RANK": "0"}, log=folder / "rank.log", entry="program:main", run_dir=str(folder)
)
agent, pid = os.getpid(), os.fork()
if pid == 0:
    try:
        be_rank(start, agent)
    finally:
        (folder / "stray").touch()
        os._exit(99)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
OWN_FILE = "sys.stdout = sys.stderr = open(run_dir + '/own.log', 'w')"
TEE = """
    class Tee:
        log = sys.stderr
        def write(self, text): self.log.write(text)
        def flush(self): self.log.flush()
    sys.stderr = Tee()
"""
CLOSED = "sys.stdout.close(), sys.stderr.close()"


def end_of(folder: Path, program: str) -> tuple[int, str]:
    """Return exit code and log of a rank with this body of `main`."""
    (folder / "program.py").write_text(
        "import os, sys\nfrom slurmddp.errors import ConfigError\n"
        f"def main(run_dir):\n    print('begun', flush=True)\n    {program}\n"
    )
    code = subprocess.run([sys.executable, "-c", RANK, str(folder)], timeout=240).returncode
    assert not (folder / "stray").exists(), "a rank must never go on as its agent"
    return code, (folder / "rank.log").read_text()


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("sys.exit(os.system('exit 1'))", 1),  # 256, of which the kernel keeps the lower byte.
        ("sys.exit(2 ** 40)", 1),
        ("sys.exit(3221225477)", 5),
        ("return 512", 1),
        ("sys.exit(-1)", 255),
        ("sys.exit(True)", 1),
        ("sys.exit(75)", 75),
        ("sys.exit()", 0),
        ("return None", 0),
    ],
)
def test_an_exit_code_of_a_failure_never_becomes_0(tmp_path, program, code):
    assert end_of(tmp_path, program)[0] == code


@pytest.mark.parametrize("place", [OWN_FILE, TEE, CLOSED, "pass"])
@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("raise ValueError('bad sample')", 1, "ValueError: bad sample\n"),
        ("sys.exit('no data')", 1, "SystemExit: no data\n"),
        ("sys.exit('\\nno data\\n')", 1, "SystemExit: no data\n"),
        ("raise ConfigError('lr is 7.', hint='Less.')", 78, "Error: lr is 7.\nLess.\n"),
    ],
)
def test_the_error_is_in_the_log_wherever_stderr_leads(tmp_path, place, end, code, told):
    found, log = end_of(tmp_path, f"{place}\n    {end}")
    assert found == code
    assert log.count(told) == 1
    if place == OWN_FILE:
        assert (tmp_path / "own.log").read_text().count(told) == 1, "the program's own file has it as well"


def test_a_message_into_a_pipe_is_written_once():
    program = "from slurmddp.host.streams import print_to_log; print_to_log('so it is')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.stderr == "so it is\n"
