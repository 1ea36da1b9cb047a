"""Each small program of `support.foreign_programs` by torchrun and by an agent: the ranks do the same.

What differs is a line of docs/guides/torchrun.md, and stands in the table of the programs.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurmddp.environments.scrub import scrub
from slurmddp.errors import HINT
from slurmddp.runs.folder.layout import RunFolder
from support import ROOT
from support.distributed.forked_agents import agents_of
from support.distributed.ranks import Program, run_programs
from support.foreign_programs import PROGRAMS, WITH_TORCH, ForeignProgram

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]

TORCHRUN = """
import os, sys
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
with open("../pid", "w") as file:
    file.write(str(os.getpid()))
try:
    run.main(sys.argv[1:])
    code = 0
except SignalException:
    code = ""
except ChildFailedError as error:
    code = error.get_first_failure()[1].exitcode
with open("../code", "w") as file:
    file.write(str(code))
"""
NEIGHBOURS = {"pack/__init__.py": "", "pack/sibling.py": "here = 'sibling'\n", "deep/neighbour.py": ""}
AT_ONCE = 3
"""Programs that run side by side."""


@dataclass(frozen=True)
class Result:
    """The output, the files and the exit code of the ranks of a program under one launcher."""

    printed: list[list[str]]
    """The lines of each rank, of both streams, in alphabetical order."""
    files: dict[str, str]
    """The files that the ranks left."""
    code: str
    """The exit code of the first rank that failed, negative for a signal; empty after a signal to stop."""


def folder_of(program: ForeignProgram, home: Path) -> Path:
    return home / re.sub(r"\W+", "-", program.name)


def by_torchrun(program: ForeignProgram, home: Path) -> Result:
    """Run one program by a torchrun of its own."""
    folder = folder_of(program, home)
    project = prepared(program, folder)
    words = [f"--log-dir={folder / 'logs'}", "--redirects=3", *started(program)]
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(start_torchrun, program.ranks, words, project)
        if program.sent is not None:
            wait_until_ready(program, project, ended.done)
            os.kill(int((folder / "pid").read_text()), program.sent)
        ended.result()
    (logs,) = (folder / "logs").glob("*/attempt_0")
    texts = [
        "".join((logs / str(rank) / f"{stream}.log").read_text() for stream in ("stdout", "stderr"))
        for rank in range(program.ranks)
    ]
    return result_of(project, texts, (folder / "code").read_text())


def together_by_torchrun(programs: Sequence[ForeignProgram], home: Path) -> dict[str, Result]:
    """Run programs of equally many ranks by one torchrun, whose ranks start one program after the other.

    Each program is a child of a shell, which passes on what torchrun has given to it.
    """
    if not programs:
        return {}
    lines = []
    for program in programs:
        project = prepared(program, folder_of(program, home))
        command = shlex.join([sys.executable, "-u", *started(program)])
        lines.append(
            f"cd {shlex.quote(str(project))}; {command} > ../printed-$RANK 2>&1; echo $? > ../code-$RANK"
        )
    ranks = programs[0].ranks
    script = home / f"all-of-{ranks}" / "project" / "all.sh"
    script.parent.mkdir(parents=True)
    script.write_text("\n".join([*lines, "exit 0"]))
    start_torchrun(ranks, ["--no-python", "sh", str(script)], script.parent)
    results = {}
    for program in programs:
        folder = folder_of(program, home)
        texts = [(folder / f"printed-{rank}").read_text() for rank in range(ranks)]
        code = (folder / "code-0").read_text().strip()
        results[program.name] = result_of(folder / "project", texts, code)
    return results


def start_torchrun(ranks: int, words: Sequence[str], project: Path) -> None:
    """Run torchrun to its end; its exit code is in `code` beside the project."""
    driver = project.parent / "torchrun.py"
    driver.write_text(TORCHRUN)
    options = [f"--nproc-per-node={ranks}", "--standalone", "--monitor-interval=0.1"]
    environ = scrub(os.environ)
    environ.pop("OMP_NUM_THREADS", None)
    # After 30 s without it torchrun kills ranks that a busy machine keeps from answering a signal.
    environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "300"
    run_programs([Program([str(driver), *options, *words], environ, project)])


def started(program: ForeignProgram) -> list[str]:
    """Return the words after `python` or `torchrun`."""
    file = f"./{program.file}" if program.file.startswith("-") else program.file
    return [*(["-m", program.module] if program.module else [file]), *program.words]


def by_agent(program: ForeignProgram, home: Path) -> Result:
    """Run one program by an agent."""
    folder = folder_of(program, home)
    project = prepared(program, folder)
    run = RunFolder(folder / "runs" / "test-00000000")
    script = f"-m {program.module}" if program.module else program.file
    section = {"script": script, "args": list(program.words)}
    config = {"nodes": 1, "ranks_per_node": program.ranks, "project_dir": str(project), "program": section}
    run.path.mkdir(parents=True)
    run.config_file.write_text(yaml.safe_dump(config))
    with agents_of(run, 1, threads=None) as (agent,):
        if program.sent is not None:
            wait_until_ready(program, project, lambda: agent.poll() is not None)
            agent.send_signal(program.sent)
        agent.wait(120)
    ends = [json.loads((run.log_dir(0) / f"exit-rank-{rank}").read_text()) for rank in range(program.ranks)]
    logs = [run.rank_log(0, rank).read_text() for rank in range(program.ranks)]
    texts = [re.sub(rf"^{HINT}.*\n", "", log, flags=re.MULTILINE) for log in logs]
    return result_of(project, texts, "" if program.sent else first_code(ends))


def prepared(program: ForeignProgram, folder: Path) -> Path:
    project = folder / "project"
    for name, text in {**NEIGHBOURS, **program.files}.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    return project


def wait_until_ready(program: ForeignProgram, project: Path, has_ended: Callable[[], bool]) -> None:
    ready = [project / f"ready-{rank}" for rank in range(program.ranks)]
    while not all(path.exists() for path in ready):
        assert not has_ended(), f"{program.name} has ended before the signal"
        time.sleep(0.02)


def first_code(ends: Iterable[dict[str, Any]]) -> str:
    """Return the exit code of the first rank that failed, as torchrun returns it."""
    for end in ends:
        code = end["exit_code"] if end["signal"] is None else -signal.Signals[end["signal"]]
        if code:
            return str(code)
    return "0"


def result_of(project: Path, texts: Iterable[str], code: str) -> Result:
    files = {
        str(path.relative_to(project)): path.read_bytes().decode(errors="backslashreplace")
        for path in sorted(project.rglob("*"))
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    return Result([sorted(normal(text, project).splitlines()) for text in texts], files, code)


def normal(text: str, project: Path) -> str:
    """Return a text without addresses, process ids and the folder of its launcher."""
    text = text.replace(str(project), "PROJECT")
    return re.sub(r"0x[0-9a-f]+", "0x0", text)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Result]]:
    """Run the chosen programs, some of them side by side, under both launchers."""
    home = tmp_path_factory.mktemp("programs")
    names = {item.name.partition("[")[2].removesuffix("]") for item in request.session.items}
    chosen = [program for program in PROGRAMS if program.name in names]
    alone = [program for program in chosen if program.sent or program.is_alone]
    together = [program for program in chosen if program not in alone]
    groups = [[program for program in together if program.ranks == ranks] for ranks in (1, 2)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        slurmddp = pool.map(partial(by_agent, home=home / "slurmddp"), chosen)
        others = pool.map(partial(by_torchrun, home=home / "alone"), alone)
        torchrun = {}
        for results in pool.map(partial(together_by_torchrun, home=home / "together"), groups):
            torchrun.update(results)
        torchrun.update(zip([program.name for program in alone], others, strict=True))
        return {
            program.name: [torchrun[program.name], result]
            for program, result in zip(chosen, slurmddp, strict=True)
        }


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_program_does_what_it_does_under_torchrun(
    results: dict[str, list[Result]], program: ForeignProgram
) -> None:
    torchrun, slurmddp = results[program.name]
    if program.draws:
        drawn = [text for result in (torchrun, slurmddp) for text in result.files.values()]
        assert len(set(drawn)) == len(drawn), "each rank draws for itself"
        torchrun, slurmddp = (
            replace(result, files=dict.fromkeys(result.files, "")) for result in (torchrun, slurmddp)
        )
    if program.differs:
        assert program.differs in (ROOT / "docs" / "guides" / "torchrun.md").read_text()
        assert [program.result.splitlines()] * program.ranks == slurmddp.printed
        assert torchrun.printed != slurmddp.printed, "the table names a difference that is gone"
        slurmddp = replace(slurmddp, printed=torchrun.printed)
    assert slurmddp == torchrun, f"slurmddp: {slurmddp}\ntorchrun: {torchrun}"


def test_torch_is_the_programs_own(tmp_path: Path) -> None:
    """Variables before `import torch` count, draws differ, and a thread saves after the last line."""
    program = ForeignProgram("torch", WITH_TORCH)
    torchrun, slurmddp = by_torchrun(program, tmp_path / "torchrun"), by_agent(program, tmp_path / "slurmddp")
    drawn = [
        text for result in (torchrun, slurmddp) for name, text in result.files.items() if ".pt" not in name
    ]
    assert len(set(drawn)) == len(drawn) == 12, "each rank draws for itself"
    assert slurmddp.printed == torchrun.printed
    assert slurmddp.printed[0][-1].startswith("DebugLevel.DETAIL")
    sizes = [
        {name: len(text) for name, text in result.files.items() if ".pt" in name}
        for result in (torchrun, slurmddp)
    ]
    assert sizes[0] == sizes[1]
    assert len(sizes[0]) == 4
