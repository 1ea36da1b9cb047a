"""Child program of test_killed_writer: forks savers, kills each at one moment, reports the result.

    python saves_killed.py FOLDER steps            kill at every file operation in turn
    python saves_killed.py FOLDER parts            the same, for a writer of a part, then for the publisher
    python saves_killed.py FOLDER random SEED N    kill at random moments until N saves were killed
Prints one JSON line per kill: newest step that reads, whether its content is right, whether the save ended.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.files import parts
from slurmddp.checkpoint.files.manifest import folder_name
from slurmddp.checkpoint.state.writer import write_shards

torch.set_num_threads(1)
ELEMENTS = 1 << 19


def state_of(step):
    weights = torch.arange(ELEMENTS, dtype=torch.float32) + step
    return {"weights": weights, "tied": weights, "step": step}


def save(root, step):
    checkpoint.write(root, step, state_of(step), meta={"kind": "test"}, keep_last=2)


def kill_at(operation):
    """Make this process kill itself just before its file operation number `operation`."""
    left = [operation]

    def counted(real):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "open"):
        setattr(os, name, counted(getattr(os, name)))


def in_child(action):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)

    return pid


def report(root, step, status):
    path = checkpoint.latest(root)
    loaded = checkpoint.read(path)
    right = torch.equal(loaded.state["weights"], state_of(loaded.step)["weights"])
    line = {"saving": step, "found": loaded.step, "right": right and loaded.state["step"] == loaded.step}
    line["ended"] = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
    line["killed"] = os.WIFSIGNALED(status)
    print(json.dumps(line), flush=True)
    return line


def every_operation(root):
    for operation in range(1000):
        shutil.rmtree(root, ignore_errors=True)
        for step in (1, 2):
            save(root, step)
        again = operation % 2  # every other time the newest step is saved once more, with other content
        step = 2 if again else 3

        def attempt(step=step, again=again, operation=operation):
            kill_at(operation // 2)
            state = {**state_of(step), "again": again}
            checkpoint.write(root, step, state, meta={}, keep_last=2)

        line = report(root, step, os.waitpid(in_child(attempt), 0)[1])
        save(root, 4)
        if [path.name for path in sorted(root.iterdir()) if path.name.startswith(".")]:
            raise SystemExit("a later save left leftovers")
        if line["ended"] and again:
            return


def every_operation_on_parts(root):
    parts.PATIENCE_S = 0.3
    for doomed in (0, 1):
        for operation in range(1000):
            shutil.rmtree(root, ignore_errors=True)
            save_in_parts(root, 2)
            actions = actions_of(root, 3)
            killed = in_child(partial(do_until, operation, actions[doomed]))
            other = in_child(actions[1 - doomed])
            status = os.waitpid(killed, 0)[1]
            os.waitpid(other, 0)
            line = report(root, 3, status)
            save_in_parts(root, 4)
            if [path.name for path in root.iterdir() if path.name.startswith(".")]:
                raise SystemExit("a later save left leftovers")
            if line["ended"]:
                break


def do_until(operation, action):
    kill_at(operation)
    action()


def actions_of(root, step):
    """Return the actions of the publisher, and of the writer of the other part."""
    save = parts.Parts(root, folder_name(step), step, 2)
    return (
        lambda: checkpoint.write(root, step, state_of(step), meta={}, keep_last=2, parts=save),
        lambda: write_shards(save, 1, state_of(step)),
    )


def save_in_parts(root, step):
    publish, write_part = actions_of(root, step)
    write_part()
    publish()


def random_moments(root, seed, times):
    chance = random.Random(seed)
    save(root, 0)
    begin = time.perf_counter()
    os.waitpid(in_child(lambda: save(root, 1)), 0)
    usual_s = time.perf_counter() - begin
    killed = 0

    for step in range(2, 20 * times):
        pid = in_child(lambda step=step: save(root, step))
        time.sleep(chance.uniform(0, 1.2 * usual_s))
        os.kill(pid, signal.SIGKILL)
        line = report(root, step, os.waitpid(pid, 0)[1])
        killed += line["killed"]
        # Estimate the duration of a save again after each kill, because the load of the machine changes.
        usual_s *= 1.05 if line["killed"] else 0.85
        if killed == times:
            return


if __name__ == "__main__":
    root = Path(sys.argv[1])
    if sys.argv[2] == "steps":
        every_operation(root)
    elif sys.argv[2] == "parts":
        every_operation_on_parts(root)
    else:
        random_moments(root, int(sys.argv[3]), int(sys.argv[4]))
