"""Our host lists against SLURM's own; `scontrol` needs a configuration for this, but no running SLURM."""

import os
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmddp.environments.hostlist import compress, expand
from slurmddp.errors import ConfigError
from support.slurm.versions import by_version

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory):
    conf = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=x\nNodeName=n1\nPartitionName=p Nodes=ALL\n")

    def ask(verb, text):
        return subprocess.run(
            ["scontrol", "show", verb, text],
            env={**os.environ, "SLURM_CONF": str(conf)},
            capture_output=True,
            text=True,
            check=False,
        )

    return ask


@pytest.mark.parametrize(
    "text",
    [
        "alpha,beta",
        "tux2,tux1",
        "linux[1,2]",
        "a[01-03,7]",
        "a[9-010]",
        "a[098-101]",
        "r[0-1]n[08-10]",
        "a[1-2][3-4]",
        "rack[1-2]-node[03-04],login",
        "a b\tc\n,,d",
        "a,a",
        "[1-3]",
        "n1.example.org,n2",
    ],
)
def test_lists_are_read_as_slurm_reads_them(scontrol, text):
    assert list(expand(text)) == scontrol("hostnames", text).stdout.split()


@pytest.mark.parametrize("text", ["a[]", "a[1,,2]", "a[3-1]", "a[x-y]", "a[1-2-3]", "a[-1]", "a[1-70000]"])
def test_what_slurm_refuses_is_refused(scontrol, text):
    assert "Invalid hostlist" in scontrol("hostnames", text).stderr
    with pytest.raises(ConfigError):
        expand(text)


def test_a_bracket_in_brackets_is_refused_though_24_11_reads_it(scontrol):
    """No cluster has nodes of such names, so SLURM prints no such list."""
    answer = scontrol("hostnames", "a[[1-2]]")
    told = (answer.stdout.split(), "Invalid hostlist" in answer.stderr)
    assert told == by_version(([], True), (["a[1]", "a[2]"], False))
    with pytest.raises(ConfigError):
        expand("a[[1-2]]")


names = st.lists(
    st.builds(
        lambda prefix, number, width: f"{prefix}{number:0{width}d}",
        st.sampled_from(["n", "gpu-", "r1n"]),
        st.integers(0, 20),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=20,
)


@settings(deadline=None, max_examples=40)
@given(names=names)
def test_slurm_reads_our_lists_and_we_read_slurms(scontrol, names):
    assert scontrol("hostnames", compress(names)).stdout.split() == names
    assert list(expand(scontrol("hostlist", ",".join(names)).stdout.strip())) == names
