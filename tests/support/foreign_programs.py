"""Small programs with all that a program can do at its start and its end; `RANK` is in `rank`.

`tests/end_to_end/test_as_under_torchrun.py` runs each by torchrun and by an agent of slurmddp, and compares
what the ranks print, the files that they leave, and their exit codes.
"""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

PRELUDE = "import os, sys\nrank = os.environ['RANK']\n"


@dataclass(frozen=True)
class ForeignProgram:
    """A program, and the way in which it is started."""

    name: str
    source: str
    words: Sequence[str] = ()
    ranks: int = 2
    """Number of ranks. A program that fails has one rank, because both launchers would end other ranks."""
    sent: signal.Signals | None = None
    """The signal that is sent to the launcher after each rank has created the file `ready-RANK`."""
    is_alone: bool = False
    """Whether the program examines its own process, so that torchrun itself must be its parent."""
    draws: bool = False
    """Whether its files contain random numbers, which must differ between all ranks and both launchers."""
    differs: str = ""
    """The line of docs/guides/torchrun.md that explains why slurmddp differs; its result is `result`."""
    result: str = ""
    """The output of each rank under slurmddp, if it differs."""
    file: str = "program.py"
    """The file of the source; a module is started by `-m`."""
    module: str = ""

    @property
    def files(self) -> dict[str, str]:
        return {self.file: PRELUDE + textwrap.dedent(self.source).strip() + "\n"}


def _program(name: str, source: str, **options: object) -> ForeignProgram:
    return ForeignProgram(name, source, **options)  # type: ignore[arg-type]


def _fails(name: str, source: str, **options: object) -> ForeignProgram:
    return ForeignProgram(name, source, ranks=1, **options)  # type: ignore[arg-type]


START = [
    _program("arguments", "print(sys.argv)", words=["a b", "", "--x=1", "-m", "--", "é", "${x}", "*"]),
    _program(
        "names", "print(__name__, __file__, __spec__, __package__, __doc__, sys.path[0], sorted(vars()))"
    ),
    _program("folder", "print(os.getcwd(), sorted(name for name in os.listdir() if name.endswith('.py')))"),
    _program("main module", "import __main__; print(vars(__main__) is globals(), __main__.rank)"),
    _program("flags", "print(sys.flags, sys.warnoptions, sys._xoptions, sys.orig_argv[1:])"),
    _program("interpreter", "print(sys.executable, sys.prefix, sys.base_prefix, sys.path[1:])"),
    _program("finders", "print(sys.meta_path, sys.path_hooks, 'sitecustomize' in sys.modules)"),
    _program(
        "modules",
        "print([name for name in ('torch', 'numpy', 'json', 're', 'logging', 'random', 'slurmddp')"
        " if name in sys.modules])",
    ),
    _program("hooks", "print(sys.excepthook, sys.unraisablehook, sys.displayhook, sys.gettrace())"),
    _program("collector", "import gc; print(gc.get_threshold(), gc.isenabled(), gc.get_freeze_count())"),
    _program(
        "signals",
        "import signal\nprint([(n, signal.getsignal(n)) for n in sorted(signal.valid_signals())"
        " if n != signal.SIGRTMIN + 7])\nprint(signal.pthread_sigmask(signal.SIG_BLOCK, []))",
        is_alone=True,
    ),
    _program("wake-up pipe", "import signal; print(signal.set_wakeup_fd(-1))"),
    _program("standard input", "print(repr(sys.stdin.read()), sys.stdin.fileno())"),
    _fails("input", "input('name? ')"),
    _fails("debugger", "import sys\nbreakpoint()\nprint('after it')"),
    _program(
        "streams",
        "for s in (sys.stdout, sys.stderr):\n"
        "    print(s.name, s.encoding, s.errors, s.write_through, s.isatty(), s.fileno(), type(s.buffer))",
    ),
    _program("surrogates", "print('\\udcff', file=sys.stderr)"),
    _program("unbuffered", "sys.stdout.write('no newline'); os._exit(0)"),
    _program("limits", "import resource as r; print(r.getrlimit(r.RLIMIT_NOFILE), os.umask(0), os.nice(0))"),
    _program(
        "threads", "import threading; print(threading.active_count(), len(os.listdir('/proc/self/task')))"
    ),
    _program("group", "print(os.getpgrp() == os.getpid())", is_alone=True),
    _program("locale", "import locale; print(locale.getpreferredencoding(), sys.getfilesystemencoding())"),
    _program(
        "warnings", "import warnings; warnings.warn('old', DeprecationWarning); print(warnings.filters)"
    ),
    _program(
        "logging", "import logging; print(logging.root.handlers, logging.root.level); logging.warning('x')"
    ),
    _program(
        "multiprocessing",
        "import multiprocessing as m\n"
        "print(m.get_start_method(), m.current_process().name, m.parent_process())",
    ),
    _program(
        "variables",
        "print({n: os.environ.get(n) for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE',"
        " 'OMP_NUM_THREADS', 'PYTHONPATH', 'PYTHONFAULTHANDLER', 'PYTHONSAFEPATH')})",
    ),
    _program(
        "draws",
        """
        import random, secrets, uuid, multiprocessing, tempfile
        name = next(tempfile._get_candidate_names())
        drawn = [random.random(), secrets.token_hex(), uuid.uuid4(), hash('x'), name]
        drawn.append(bytes(multiprocessing.current_process().authkey).hex())
        for number, value in enumerate(drawn):
            open(f'{number}-{rank}', 'w').write(str(value))
        """,
        draws=True,
    ),
    _program(
        "child program",
        """
        import subprocess
        code = "import sys, os; print(sys.path, 'PYTHONPATH' in os.environ, 'sitecustomize' in sys.modules)"
        subprocess.run([sys.executable, "-c", code])
        # Without glibc's own 32 and 33, which posix_spawn (as in make) leaves ignored in its child.
        ignored = "while read name set; do [ $name != SigIgn: ] || echo $((0x$set & ~0x180000000)); done"
        subprocess.run(["sh", "-c", f"{ignored} </proc/self/status; echo $0 $RANK"])
        """,
    ),
    _program(
        "stacks at a crash",
        "import faulthandler; print(faulthandler.is_enabled())",
        differs="`faulthandler` is on",
        result="True",
    ),
    _program(
        "module",
        "print(__name__, __spec__.name, sys.argv, sys.path[0])",
        file="part.py",
        module="part",
        words=["-m", "x"],
    ),
    _program(
        "package",
        "from . import sibling\nprint(__package__, sibling.__name__, sys.argv[0], __spec__.name)",
        file="pack/__main__.py",
        module="pack",
    ),
    _program(
        "module in a package",
        "from .sibling import here\nprint(__name__, __package__, here)",
        file="pack/run.py",
        module="pack.run",
    ),
    _program(
        "script in a folder",
        "import neighbour\nprint(neighbour.__name__, sys.path[0], sys.argv[0])",
        file="deep/program.py",
    ),
    _program("script that looks like an option", "print(sys.argv, sys.path[0])", words=["-h"], file="-x.py"),
]

ROWS = """
import csv
def train(writer):  # a function of the program: its globals are a reference cycle
    for number in range(100):
        writer.writerow([number])
rows = open(f'rows-{rank}.csv', 'w', newline='')
train(csv.writer(rows))
"""
PICKLED = """
import pickle, threading, time
class Net:
    weight = 3
def save(net, name):
    time.sleep(0.2)
    with open(name, 'wb') as stream:
        pickle.dump(net, stream)
"""

END = [
    _program("open file", ROWS),
    _fails("open file, then an error", f"{ROWS}\nraise ValueError('at the end')"),
    _fails("open file, then a code", f"{ROWS}\nsys.exit(3)"),
    _program(
        "open compressed file",
        "import gzip\nfile = gzip.GzipFile(f'x-{rank}.gz', 'wb', mtime=0)\n"
        "def more(): file.write(b'x' * 1000)\nmore()",
    ),
    _program(
        "open archive",
        "import zipfile\nfile = zipfile.ZipFile(f'x-{rank}.zip', 'w')\n"
        "file.writestr(zipfile.ZipInfo('a'), 'text')\ndef more(): return file",
    ),
    _program(
        "open shelf",
        "import shelve, dbm.dumb\nshelf = shelve.Shelf(dbm.dumb.open(f'shelf-{rank}'))\n"
        "shelf['a'] = 1\ndef more(): return shelf",
    ),
    _program(
        "wrapped file",
        "import io\nfile = io.TextIOWrapper(io.BufferedWriter(io.FileIO(f'w-{rank}', 'w')))\n"
        "file.write('text')\ndef more(): return file",
    ),
    _program(
        "memory handler",
        """
        import logging, logging.handlers
        target = logging.FileHandler(f'log-{rank}', mode='w')
        logging.root.addHandler(logging.handlers.MemoryHandler(1000, target=target))
        logging.root.warning('kept in memory')
        """,
    ),
    _program(
        "queue of log lines",
        """
        import atexit, logging, logging.handlers, queue
        lines = queue.Queue()
        listener = logging.handlers.QueueListener(lines, logging.FileHandler(f'log-{rank}'))
        listener.start(); atexit.register(listener.stop)
        logging.root.addHandler(logging.handlers.QueueHandler(lines))
        logging.warning('by a thread')
        """,
    ),
    _program(
        "open transaction",
        "import sqlite3\nbase = sqlite3.connect(f'base-{rank}')\nbase.execute('create table a(b)')\n"
        "base.execute('insert into a values (1)')\ndef more(): return base",
    ),
    _program("no newline", "print('the end', end='')"),
    _program("closed streams", "sys.stdout.close(); sys.stderr.close()"),
    _program("own streams", "sys.stdout = open(f'out-{rank}', 'w')\nprint('into a file')"),
    _program("exit handlers", "import atexit\nfor n in range(3): atexit.register(print, 'handler', n)"),
    _program(
        "exit handler that registers",
        "import atexit\natexit.register(lambda: atexit.register(print, 'inner'))\nprint('end')",
    ),
    _program(
        "exit handler that fails",
        "import atexit\natexit.register(print, 'first')\natexit.register(lambda: 1 / 0)",
    ),
    _program("exit handler that exits", "import atexit\natexit.register(sys.exit, 5)"),
    _fails("exit handler that ends the process", "import atexit\natexit.register(os._exit, 5)"),
    _program(
        "exit handler that starts threads",
        """
        import atexit, threading
        from concurrent.futures import ThreadPoolExecutor
        def late():
            try: ThreadPoolExecutor(1).submit(print, 'late')
            except RuntimeError as error: print(error)
        atexit.register(late)
        threading._register_atexit(print, 'before the threads end')
        """,
    ),
    _fails(
        "exit handlers after an error", "import atexit\natexit.register(print, 'handler')\nraise KeyError(3)"
    ),
    _program(
        "exit handler that pickles",
        f"{PICKLED}\nimport atexit\natexit.register(save, Net(), f'net-{{rank}}')",
    ),
    _program(
        "thread that pickles",
        f"{PICKLED}\nthreading.Thread(target=save, args=(Net(), f'net-{{rank}}')).start()",
    ),
    _fails(
        "thread after an error",
        f"{PICKLED}\nthreading.Thread(target=save, args=(Net(), f'net-{{rank}}')).start()\nraise KeyError",
    ),
    _program(
        "timer",
        "import threading\nthreading.Timer(0.2, lambda: open(f'late-{rank}', 'w').write('x')).start()",
    ),
    _program(
        "daemon thread",
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(60), print('never')), daemon=True).start()",
    ),
    _program(
        "executor",
        f"{PICKLED}\nfrom concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)\n"
        "for n in range(3): pool.submit(save, Net(), f'net-{rank}-{n}')",
    ),
    *[
        _program(
            f"processes by {method}",
            f"""
            import multiprocessing
            def work(number): return number * 2
            if __name__ == '__main__':
                with multiprocessing.get_context('{method}').Pool(1) as pool:
                    print(pool.map(work, range(3)))
            """,
        )
        for method in ("fork", "spawn", "forkserver")
    ],
    _program(
        "process that is not joined",
        """
        import multiprocessing, time
        def work(name): time.sleep(0.2); open(name, 'w').write('done')
        multiprocessing.get_context('fork').Process(target=work, args=(f'late-{rank}',)).start()
        """,
    ),
    _program(
        "daemon process",
        """
        import multiprocessing, time
        def work(): time.sleep(60); print('never')
        multiprocessing.get_context('fork').Process(target=work, daemon=True).start()
        """,
    ),
    _program(
        "queue",
        """
        import multiprocessing
        queue = multiprocessing.get_context('fork').Queue()
        def work(): open(f'got-{rank}', 'w').write(str(len(queue.get())))
        multiprocessing.get_context('fork').Process(target=work).start()
        queue.put('x' * 100000)
        """,
    ),
    _program(
        "manager by spawn",
        """
        import multiprocessing
        class Place:
            name = 'rank'
        def work(shared, lock, place):
            with lock: shared[place.name] = os.environ['RANK']
        if __name__ == '__main__':
            context = multiprocessing.get_context('spawn')
            with context.Manager() as manager:
                shared, lock = manager.dict(), manager.Lock()
                process = context.Process(target=work, args=(shared, lock, Place()))
                process.start(); process.join(); print(dict(shared), process.exitcode)
        """,
    ),
    _program(
        "pool that is not closed",
        """
        import multiprocessing
        def double(number): return number * 2
        pool = multiprocessing.get_context('fork').Pool(1)
        print(pool.map(double, range(3)))
        """,
    ),
    _program(
        "program again",
        "if 'again' not in sys.argv: os.execv(sys.executable, [sys.executable, *sys.argv, 'again'])\n"
        "print(sys.argv[1:], __name__)",
    ),
    _program(
        "forked child",
        "import atexit\natexit.register(lambda: open(f'end-{rank}', 'a').write('x'))\n"
        "if os.fork() == 0: sys.exit()\nos.wait()",
    ),
    _program("finalizer", "import weakref\nclass A: pass\na = A()\nweakref.finalize(a, print, 'finalized')"),
    _program(
        "temporary folder",
        "import tempfile\nfolder = tempfile.TemporaryDirectory(dir='.')\n"
        "open(folder.name + '/x', 'w')\nfile = tempfile.NamedTemporaryFile(dir='.')",
    ),
    _program(
        "generator", "def steps():\n    try: yield 1\n    finally: print('closed')\ng = steps(); next(g)"
    ),
    _program("destructor", "class A:\n    def __del__(self): print('deleted', rank is None)\na = A()"),
    _program(
        "destructor in a cycle", "class A:\n    def __del__(self): print('deleted')\na = A(); a.a = a; del a"
    ),
    _program("destructor that fails", "class A:\n    def __del__(self): 1 / 0\na = A(); del a\nprint('on')"),
    _program(
        "event loop",
        """
        import asyncio
        async def wait():
            try: await asyncio.sleep(60)
            finally: print('cancelled')
        async def main(): asyncio.create_task(wait()); await asyncio.sleep(0)
        asyncio.run(main())
        """,
    ),
    _program(
        "thread that fails",
        "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t'); t.start()",
    ),
    _program(
        "mapped file",
        "import mmap\nfile = open(f'm-{rank}', 'w+b'); file.truncate(9)\n"
        "page = mmap.mmap(file.fileno(), 9); page[:4] = b'text'",
    ),
]

CODES = [
    _program("exit", "sys.exit()"),
    _program("exit 0", "sys.exit(0)"),
    _program("exit 256", "sys.exit(256)"),
    _program("exit without clean-up", "print('said'); os._exit(0)"),
    *[
        _fails(f"exit {code}", f"sys.exit({code})")
        for code in ("2", "-1", "True", "2 ** 40", "'no data'", "(1, 2)")
    ],
    _fails("exit code of a class", "raise SystemExit(KeyError('x'))"),
    _fails("exit 7 without clean-up", "os._exit(7)"),
    _fails(
        "chained errors", "try: 1 / 0\nexcept ZeroDivisionError as e: raise RuntimeError('second') from e"
    ),
    _fails("error with a note", "class Own(Exception): pass\nraise Own('first line\\nsecond line')"),
    _fails("syntax", "x = = 3"),
    _fails("missing module", "import there_is_no_such_module"),
    _fails(
        "own hook", "sys.excepthook = lambda kind, error, frames: print('hook', kind.__name__, error)\n1 / 0"
    ),
    _fails("hook that fails", "def hook(*args): raise KeyError('hook')\nsys.excepthook = hook\n1 / 0"),
    _fails("hook that exits", "sys.excepthook = lambda *args: sys.exit(9)\n1 / 0"),
    _fails("interrupted by itself", "raise KeyboardInterrupt", is_alone=True),
    _fails("killed by itself", "import signal; os.kill(os.getpid(), signal.SIGKILL)", is_alone=True),
    _fails(
        "out of time",
        "import signal; signal.setitimer(signal.ITIMER_REAL, 0.1); signal.pause()",
        is_alone=True,
    ),
    _fails("exit code without a text", "class A:\n    def __str__(self): raise ValueError\nsys.exit(A())"),
    _fails("stream that is gone", "sys.stderr = None; raise ValueError('not seen')"),
    _fails("recursion", "sys.tracebacklimit = 1\ndef f(): f()\nf()"),
    _program(
        "broken pipe", "r, w = os.pipe(); os.close(r)\ntry: os.write(w, b'x')\nexcept OSError as e: print(e)"
    ),
]

READY = "open(f'ready-{rank}', 'w').close()"
WAIT = f"""
import signal, threading, time
program, waiting = sys._getframe(), sys._getframe().f_lineno + 7
def report_readiness(main):
    while sys._current_frames()[main] is not program or program.f_lineno != waiting:
        time.sleep(0.01)
    {READY}
threading.Thread(target=report_readiness, args=(threading.get_ident(),)).start()
try:
    time.sleep(600)
"""
"""A program that is ready once it waits on its last line: then an interrupt shows this line."""
COUNT = f"""
import signal, time
stop = []
before = signal.getsignal(NUMBER)
def handle(number, frame):
    if callable(before) and number != signal.SIGINT:
        before(number, frame)
    stop.append(number)
signal.signal(NUMBER, handle)
{READY}
while not stop:
    time.sleep(0.01)
time.sleep(0.5)
print('saved', len(stop))
"""
LEAVE = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
SIGNALS = [
    _program("SIGTERM, chained", COUNT.replace("NUMBER", "signal.SIGTERM"), sent=signal.SIGTERM),
    _program("SIGTERM, not handled", f"{WAIT}finally: print('never')", sent=signal.SIGTERM),
    _program("SIGTERM that exits", f"{LEAVE}{WAIT}finally: print('finally')", sent=signal.SIGTERM),
    _program("interrupt, counted", COUNT.replace("NUMBER", "signal.SIGINT"), sent=signal.SIGINT),
    _program("interrupt, saved", f"{WAIT}except KeyboardInterrupt: print('saved')", sent=signal.SIGINT),
    _program(
        "SIGTERM, in an event loop",
        """
        import asyncio, signal
        async def main():
            stopped = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
            open(f'ready-{rank}', 'w').close()
            await stopped.wait(); open(f'saved-{rank}', 'w').write('x')
        asyncio.run(main())
        """,
        sent=signal.SIGTERM,
    ),
    _program("interrupt, not handled", f"{WAIT}finally: print('finally')", sent=signal.SIGINT),
]

PROGRAMS = [*START, *END, *CODES, *SIGNALS]

WITH_TORCH = """
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
os.environ["OMP_NUM_THREADS"] = "2"
import threading, time
import numpy as np, torch, torch.distributed as dist
class Net(torch.nn.Linear): pass
def save(net):
    time.sleep(0.5)
    torch.save(net.state_dict(), f"last-{rank}.pt")
    torch.save(net, f"net-{rank}.pt")
print(dist.get_debug_level(), torch.get_num_threads())
for name, value in {"seed": torch.initial_seed(), "torch": torch.rand(1), "numpy": np.random.rand()}.items():
    open(f"{name}-{rank}", "w").write(str(value))
net = Net(2, 2)
torch.nn.init.ones_(net.weight), torch.nn.init.ones_(net.bias)
threading.Thread(target=save, args=(net,)).start()
"""
"""Variables before the import, draws of torch and NumPy, and a checkpoint that a thread writes at the end."""
