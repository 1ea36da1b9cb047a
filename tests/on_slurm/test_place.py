"""Tasks of a real SLURM that find out who they are, and meet; the layouts that other tools get wrong."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from slurmddp.environments.detect import detect
from slurmddp.environments.hostlist import expand
from slurmddp.environments.scrub import scrub
from slurmddp.errors import MismatchError
from slurmddp.training.device.choice import choose_device
from slurmddp.training.device.visible_devices import visible_names
from support import TESTS
from support.slurm.sandboxes import bring_back
from support.slurm.train_project import Command, make_project
from support.slurm.versions import by_version

pytestmark = pytest.mark.slurm


PROBE = TESTS / "support/distributed/place_probe.py"
SHOW = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
SRUN = ["srun", "--mpi=none", "--kill-on-bad-exit=1"]


def run(sandbox, *words, **variables):
    environ = {**scrub(os.environ), **sandbox.environment(), "CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def places(tmp_path):
    """Read what the tasks of a step that wrote to `places.output` found about themselves."""

    class Places:
        output = f"--output={tmp_path}/%t.json"

        def read(self, done):
            assert done.returncode == 0, done.stderr
            return [detect(json.loads(file.read_text())) for file in sorted(tmp_path.glob("*.json"))]

    return Places()


def test_uneven_tasks_fill_the_world_once(sandbox, places):
    found = places.read(run(sandbox, *SRUN, "-N2", "-n5", "-O", places.output, *SHOW))
    assert [info.rank for info in found] == [0, 1, 2, 3, 4]
    assert {(info.world_size, info.nodes, info.environment) for info in found} == {(5, 2, "slurm")}
    assert len({(info.node_rank, info.local_rank) for info in found}) == 5
    for node_rank in (0, 1):
        here = [info for info in found if info.node_rank == node_rank]
        assert {info.local_world_size for info in here} == {len(here)}
    assert len({info.launch_id for info in found}) == 1
    assert {info.hosts for info in found} == {tuple(sandbox.nodes[:2])}


def test_a_step_on_the_second_node_is_a_world_of_its_own(sandbox, places):
    step = [*SRUN, "-N1", "-n2", "-r1", "-O", places.output, *SHOW]
    found = places.read(run(sandbox, "salloc", "-N2", "-n4", "-O", *step))
    assert sorted(info.rank for info in found) == [0, 1]
    assert {(info.world_size, info.nodes, info.hosts) for info in found} == {(2, 1, (sandbox.nodes[1],))}


def test_cyclic_ranks(sandbox, places):
    found = places.read(run(sandbox, *SRUN, "-N2", "-n4", "-O", "-m", "cyclic", places.output, *SHOW))
    assert sorted(info.rank for info in found) == [0, 1, 2, 3]
    assert next(info for info in found if info.rank == 0).node_rank == 0
    assert next(info for info in found if info.rank == 1).node_rank == 1


@pytest.mark.parametrize("flags", [["--gpus-per-task=1"], ["--gres=gpu:2", "--gpu-bind=per_task:1"]])
def test_tasks_with_gpus_of_their_own_take_the_first_they_see(sandbox, tmp_path, flags):
    done = run(sandbox, *SRUN, "-N1", "-n2", *flags, f"--output={tmp_path}/%t.json", *SHOW)
    assert done.returncode == 0, done.stderr
    environs = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.json"))]
    assert [visible_names(environ) for environ in environs] == [("0",), ("1",)]
    # More tasks would see no more than that, whatever the node has.
    infos = [replace(detect(environ), gpus_on_node=1) for environ in environs]
    assert [choose_device(info, environ, 1) for info, environ in zip(infos, environs, strict=True)] == [0, 0]


def test_salloc_without_srun_is_told_what_to_type(sandbox):
    done = run(sandbox, "salloc", "-N2", "-n4", "-O", *SHOW)
    with pytest.raises(MismatchError, match="--ntasks=4") as caught:
        detect(json.loads(done.stdout))
    assert "srun python" in caught.value.hint


def test_a_job_allocated_from_inside_a_step_is_not_taken_for_that_step(sandbox):
    done = run(sandbox, *SRUN, "-N1", "-n1", "salloc", "-N2", "-n4", "-O", *SHOW)
    environ = json.loads(done.stdout)
    assert environ["SLURM_STEP_NUM_TASKS"] == "1"
    with pytest.raises(MismatchError, match="another step"):
        detect(environ)


def probes(done):
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_ranks_on_two_nodes_meet_over_the_network(sandbox):
    found = probes(run(sandbox, *SRUN, "-N2", "-n4", "-O", sys.executable, str(PROBE)))
    assert sorted(rank["rank"] for rank in found) == [0, 1, 2, 3]
    assert {(rank["total"], rank["backend"], rank["undone"]) for rank in found} == {(10.0, "gloo", True)}
    assert ({rank["interface"] for rank in found} == {"lo"}) == (not sandbox.plan.namespaces)


def test_two_steps_of_one_job_meet_each_on_their_own(sandbox):
    step = f"srun --mpi=none --overlap -O -N2 -n2 {sys.executable} {PROBE}"
    done = run(sandbox, "salloc", "-N2", "-n2", "-O", "bash", "-c", f"{step} & {step}; wait")
    found = probes(done)
    assert [rank["total"] for rank in found] == [3.0] * 4


def test_rank_zero_away_from_the_first_node_is_refused_and_a_given_address_helps(sandbox, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{sandbox.nodes[1]}\n{sandbox.nodes[0]}\n")
    command = [*SRUN, "-n2", "--distribution=arbitrary", sys.executable, str(PROBE)]
    given = {"SLURM_HOSTFILE": str(hosts)}
    if sandbox.plan.namespaces:  # On plain loopback all nodes have one address, which the sandbox gives.
        done = run(sandbox, *command, **given)
        assert done.returncode != 0
        assert "Rank 0 runs on" in done.stderr
        assert "--distribution=arbitrary" in done.stderr
        given["SLURMDDP_MASTER_ADDR"] = sandbox.nodes[1]
    found = probes(run(sandbox, *command, **given))
    assert [rank["total"] for rank in found] == [3.0, 3.0]


TREE = "SwitchName=s1 Nodes={1},{2}\nSwitchName=s2 Nodes={0}\nSwitchName=top Switches=s1,s2\n"
SEVERAL = """---
- topology: switches
  cluster_default: true
  tree:
    switches:
      - {{switch: top, children: "s[1-2]"}}
      - {{switch: s1, nodes: "{1},{2}"}}
      - {{switch: s2, nodes: "{0}"}}
- topology: alphabet
  cluster_default: false
  flat: {{alpha_step_rank: true}}
"""
"""Only 26.05 has topologies for single partitions, and among them one that orders tasks by names of nodes."""


@pytest.fixture
def switches(sandbox):
    """A network on whose first switch the second and third node are; in `high` 26.05 orders tasks by name."""
    conf = sandbox.root / "slurm.conf"
    before = conf.read_text()
    name = by_version("topology.conf", "topology.conf", "topology.yaml")
    plugin = by_version("TopologyPlugin=topology/tree", "TopologyPlugin=topology/tree", "")
    topology = sandbox.root / name
    topology.write_text(by_version(TREE, TREE, SEVERAL).format(*sandbox.nodes))
    own = by_version("", "", " Topology=alphabet")
    high = before.replace("PartitionName=high", f"PartitionName=high{own}")
    conf.write_text(f"{high}{plugin}\nTopologyParam=SwitchAsNodeRank\n")
    sandbox.restart_controller()
    bring_back(sandbox)
    yield
    topology.unlink()
    conf.write_text(before)
    sandbox.restart_controller()


def by_switch(sandbox):
    """Return the nodes in the order of their switches; 22.05 knows only the order of their names."""
    first, second, third = sandbox.nodes
    return by_version((first, second, third), (second, third, first))


def test_nodes_of_one_switch_follow_each_other(sandbox, places, switches):
    found = places.read(run(sandbox, *SRUN, "-N3", "-n3", places.output, *SHOW))
    assert [info.hosts for info in found] == [by_switch(sandbox)] * 3
    assert [(info.rank, info.node_rank) for info in found] == [(0, 0), (1, 1), (2, 2)]


def test_tasks_that_do_not_follow_the_nodes_are_refused_and_the_advice_helps(sandbox, switches):
    step = [*SRUN, "-p", "high", "-N3", "-n3"]
    done = run(sandbox, *step, "--distribution=block", sys.executable, str(PROBE))
    if by_version(False, False, True) and sandbox.plan.namespaces:
        assert done.returncode != 0
        assert "Rank 0 runs on" in done.stderr and "--distribution=plane=N" in done.stderr
    else:
        assert [rank["total"] for rank in probes(done)] == [6.0] * 3
    found = probes(run(sandbox, *step, "--distribution=plane=1", sys.executable, str(PROBE)))
    assert [rank["total"] for rank in found] == [6.0] * 3


def test_a_run_trains_whatever_the_order_of_its_tasks(sandbox, switches, tmp_path):
    """Its agents take their numbers from the nodes, and not from the tasks."""
    command = Command(make_project(tmp_path), sandbox.environment())
    own = ["nodes=3", "ranks_per_node=1", "cluster.partition=high", "+cluster.sbatch.distribution=block"]
    trained = command.submit("order", *own, "train.steps=3")
    trained.wait_finished()
    (started,) = trained.events("started")
    assert expand(started["nodes"]) == by_switch(sandbox)
