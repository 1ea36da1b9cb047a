"""The plan of a sandbox and the text of its files, without a start."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmddp.errors import ConfigError, SlurmError
from slurmddp.sandbox import Sandbox, conf, machine, network, plan, processes, record, shell
from slurmddp.sandbox.cluster import describe

ROOT = Path("/var/tmp/sandbox")


def make_plan(*, namespaces: bool = True, version: tuple[int, int] = (22, 5), **request: object) -> plan.Plan:
    asked = plan.Request(**{"name": "default", "root": ROOT, **request})  # type: ignore[arg-type]
    ports = () if namespaces else tuple(range(21010, 21010 + asked.nodes))
    found = plan.Machine(
        host="laptop",
        user="me",
        memory_mb=8000,
        slurm_version=version,
        subnet=3,
        controller_port=21000,
        database_port=21001,
        node_ports=ports,
    )
    return plan.Plan(request=asked, machine=found, namespaces=namespaces)


def slurm_conf(made: plan.Plan) -> str:
    return conf.render_files(made)[ROOT / "slurm.conf"]


def node_lines(made: plan.Plan) -> list[str]:
    return [line for line in slurm_conf(made).splitlines() if line.startswith("NodeName")]


def test_nodes_are_hosts_with_namespaces_and_ports_without() -> None:
    assert node_lines(make_plan(nodes=2, cpus=8)) == [
        "NodeName=n1 NodeAddr=10.77.3.11 NodeHostname=n1 Port=6818 CPUs=8 RealMemory=8000 Gres=gpu:2",
        "NodeName=n2 NodeAddr=10.77.3.12 NodeHostname=n2 Port=6818 CPUs=8 RealMemory=8000 Gres=gpu:2",
    ]
    assert node_lines(make_plan(namespaces=False, name="b", gpus=0)) == [
        "NodeName=b-n1 NodeAddr=127.0.0.1 NodeHostname=laptop Port=21010 CPUs=4 RealMemory=8000",
        "NodeName=b-n2 NodeAddr=127.0.0.1 NodeHostname=laptop Port=21011 CPUs=4 RealMemory=8000",
    ]


@pytest.mark.parametrize(
    ("version", "plugin"), [((22, 5), "cgroup/v1"), ((23, 11), "disabled"), ((25, 5), "disabled")]
)
def test_cgroups_are_left_alone_in_each_version(version: tuple[int, int], plugin: str) -> None:
    text = conf.render_files(make_plan(version=version))[ROOT / "cgroup.conf"]
    assert text.strip() == f"CgroupPlugin={plugin}"


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    mounted = make_plan(shared="nfs", shared_folder=tmp_path / "project")
    for made in (make_plan(accounting=True), make_plan(namespaces=False, nodes=5), mounted):
        record.write(tmp_path, made)
        assert record.read(tmp_path, "default") == made


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"name": "Big"}, "'Big'"),
        ({"name": "a b"}, "'a b'"),
        ({"name": ""}, "''"),
        ({"root": Path("/tmp/with blank")}, "with blank"),
        ({"root": Path("/tmp/100%")}, "100%"),
        ({"root": Path("relative")}, "relative"),
        ({"root": Path("/tmp") / ("x" * 80)}, "85 characters"),
        ({"nodes": 0}, "--nodes 0"),
        ({"nodes": 201}, "--nodes 201"),
        ({"cpus": 0}, "--cpus 0"),
        ({"gpus": -1}, "--gpus -1"),
        ({"grace_s": -1}, "--grace -1"),
        ({"link_mbit": -5}, "--link-mbit -5"),
        ({"shared": "afs", "shared_folder": Path("/usr")}, "--shared afs"),
        ({"shared": "nfs"}, "'None' does not exist"),
        ({"shared": "nfs", "shared_folder": Path("/usr/absent")}, "'/usr/absent' does not exist"),
        ({"shared": "nfs", "shared_folder": Path("/var")}, "can't mount /var, because"),
        ({"shared": "nfs", "shared_folder": Path("/usr"), "mount_options": "soft"}, "'soft'"),
        ({"shared_folder": Path("/usr")}, "--folder and --mount-options"),
        ({"mount_options": "noac"}, "--folder and --mount-options"),
    ],
)
def test_an_impossible_request_is_refused_with_the_value(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan.check(make_plan(**change).request)
    assert named in caught.value.message
    assert caught.value.hint


def test_a_limited_link_needs_a_namespace() -> None:
    with pytest.raises(ConfigError, match="--link-mbit 100 needs network namespaces"):
        machine.want_namespaces(plan.Request(name="default", root=ROOT, namespaces=False, link_mbit=100))


def test_a_mount_needs_a_namespace() -> None:
    request = plan.Request(name="default", root=ROOT, namespaces=False, shared="nfs")
    with pytest.raises(ConfigError, match="--shared nfs needs namespaces"):
        machine.want_namespaces(request)


def test_a_mount_needs_its_device_and_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    request = make_plan(shared="nfs").request
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="can't open /dev/fuse"):
        machine.require_fuse(request)
    monkeypatch.setattr(machine.os, "access", lambda path, mode: True)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the Python package mfusepy") as caught:
        machine.require_fuse(request)
    assert "slurmddp[sandbox]" in caught.value.hint
    machine.require_fuse(make_plan(shared="sshfs").request)


@pytest.mark.parametrize("name", ["`touch x`", 'a"b', "a\\b", "a\nb"])
def test_a_folder_that_glusterfs_would_misread_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    request = make_plan(shared="glusterfs", shared_folder=tmp_path / name).request
    with pytest.raises(ConfigError, match="because of a character in its path"):
        plan.check(request)


def test_a_mount_is_part_of_the_description(tmp_path: Path) -> None:
    mounted = make_plan(shared="nfs", shared_folder=tmp_path, mount_options="actimeo=5")
    assert describe(mounted).endswith(f", {tmp_path} mounted by nfs on each node (actimeo=5)")


def test_missing_programs_are_named_with_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "SYSTEM_FOLDERS", ())
    request = make_plan(accounting=True).request
    with pytest.raises(SlurmError) as caught:
        machine.require_programs(request, True, machine.search_path({"PATH": str(tmp_path)}))
    assert "slurmctld, slurmd" in caught.value.message
    assert caught.value.hint.endswith("hostname iproute2 mariadb-server munge slurm-wlm slurmdbd util-linux")
    assert "apt-get install" in caught.value.hint
    request = make_plan(shared="sshfs").request
    with pytest.raises(SlurmError) as caught:
        machine.require_programs(request, True, machine.search_path({"PATH": str(tmp_path)}))
    assert "mount munge openssh-sftp-server slurm-wlm sshfs util-linux" in caught.value.hint


def test_the_first_network_that_no_route_touches_is_taken(tmp_path: Path) -> None:
    ip = tmp_path / "ip"
    routes = "default via 192.0.2.1 dev eth0\n10.77.0.0/24 dev a\n10.77.1.7 dev b\nblackhole 10.77.2.0/23\n"
    ip.write_text(f"#!/bin/sh\ncat <<'E'\n{routes}E\n")
    ip.chmod(0o755)
    assert machine.free_subnet(str(tmp_path)) >= 4
    ip.write_text("#!/bin/sh\necho 10.0.0.0/8 dev vpn\n")
    with pytest.raises(SlurmError, match=r"No network 10\.77"):
        machine.free_subnet(str(tmp_path))


PRINTABLE = st.characters(codec="ascii", exclude_categories=["Cc"])
HOSTS_LINES = st.lists(st.text(PRINTABLE, max_size=30), max_size=8)


@given(lines=HOSTS_LINES, names=st.integers(1, 4))
def test_adding_and_removing_the_hosts_block_gives_the_file_back(lines: list[str], names: int) -> None:
    before = "".join(f"{line}\n" for line in lines)
    block = [f"10.77.0.{number}\tn{number}" for number in range(names)]
    written = network.with_block(before, ROOT, block)
    assert written.startswith(before)
    assert network.without_block(written, ROOT) == before
    assert network.with_block(written, ROOT, block) == written
    assert network.without_block(written, ROOT / "other") == written


def test_a_hosts_file_whose_end_mark_is_lost_keeps_its_lines() -> None:
    text = f"# >>> slurmddp sandbox {ROOT}\n10.77.0.11\tn1\n127.0.0.1 localhost\n"
    assert network.without_block(text, ROOT) == text


def test_hosts_blocks_of_folders_that_are_gone_are_dropped(tmp_path: Path) -> None:
    living = tmp_path / "living"
    living.mkdir()
    (living / "sandbox.json").touch()
    own = "127.0.0.1 localhost\n"
    kept = network.with_block(own, living, ["10.77.0.11\tn1"])
    assert network.without_stale(network.with_block(kept, tmp_path / "gone", ["10.77.1.11\tm1"])) == kept
    assert network.without_stale(own) == own


def test_the_environment_of_a_shell_can_be_undone() -> None:
    plain = make_plan(namespaces=False)
    before = {"PATH": "/usr/bin:/bin"}
    wanted = shell.variables(plain, ["/usr/bin", "/usr/sbin"], before)
    assert wanted == {
        "SLURM_CONF": f"{ROOT}/slurm.conf",
        "SLURMDDP_MASTER_ADDR": "127.0.0.1",
        "PATH": "/usr/bin:/bin:/usr/sbin",
        "SLURMDDP_SANDBOX_PATH": "/usr/sbin",
    }
    lines = [*shell.export_lines(wanted), *shell.unset_lines({**before, **wanted})]
    script = "\n".join([*lines, 'echo "$PATH${SLURM_CONF-none}"'])
    said = subprocess.run(["sh", "-c", script], env=before, capture_output=True, text=True, check=True)
    assert said.stdout == "/usr/bin:/binnone\n"


def test_with_namespaces_a_master_address_of_another_sandbox_is_unset() -> None:
    wanted = shell.variables(make_plan(), ["/usr/bin"], {"PATH": "/usr/bin"})
    assert wanted == {"SLURM_CONF": f"{ROOT}/slurm.conf"}
    assert "unset SLURMDDP_MASTER_ADDR" in shell.export_lines(wanted)


def test_a_recorded_pid_that_was_given_to_another_process_is_not_alive() -> None:
    mine = processes.start_time(os.getpid())
    assert mine is not None
    assert processes.Recorded("me", os.getpid(), mine).alive()
    assert not processes.Recorded("me", os.getpid(), mine + "0").alive()


def test_a_missing_sandbox_is_reported_with_near_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    damaged = tmp_path / "slurmddp/sandbox/training/sandbox.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{}")
    with pytest.raises(SlurmError, match=r"No sandbox 'traning' is up in .*/traning") as caught:
        Sandbox("traning").status()
    assert "Did you mean training?" in caught.value.hint
    assert not Sandbox("traning").down()
    with pytest.raises(SlurmError, match="damaged"):
        Sandbox("training").status()


def test_a_port_that_is_free_while_its_daemon_restarts_is_not_given_to_another_sandbox() -> None:
    mine, other = (machine.free_ports(4, Path(root)) for root in ("/tmp/mine", "/tmp/other"))
    assert len({*mine, *other}) == 8
    assert all(machine.FIRST_PORT <= port <= machine.LAST_PORT for port in (*mine, *other))


def test_a_folder_with_other_things_in_it_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("dear reader")
    sandbox = Sandbox("other", root=tmp_path)
    assert not sandbox.down()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
