from slurmddp.environments.detect import detect
from slurmddp.environments.emit import emulated_step, rank_environment
from slurmddp.environments.scrub import scrub


def test_scrub_leaves_nothing_of_a_job_and_everything_else():
    kept = {
        "PATH": "/bin",
        "HOME": "/home/me",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_CLUSTERS": "big",
        "SLURM_JWT": "eyJ",
        "SLURMDDP_MASTER_ADDR": "10.0.0.1",
        "SLURMDDP_USER_SETTING": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    dropped = {
        **emulated_step(2, 0, "77", "/runs/x", 1, 4),
        **rank_environment(detect(emulated_step(2, 0, "77", "/runs/x", 1, 4)), 0, 2),
        "SLURM_CPU_BIND": "mask_cpu:0x1",
        "SLURM_MEM_PER_CPU": "1000",
        "SBATCH_TIMELIMIT": "7",
        "SRUN_CPUS_PER_TASK": "2",
        "SQUEUE_FORMAT": "%i",
        "SACCT_FORMAT": "jobid",
        "PMI_RANK": "0",
        "PMIX_RANK": "0",
        "OMPI_COMM_WORLD_RANK": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "GROUP_RANK": "0",
        "ROLE_RANK": "0",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
        "SLURMDDP_LAUNCHER": "local",
        "SLURMDDP_ENVIRONMENT": "single",
    }
    assert scrub({**kept, **dropped}) == kept


def test_scrub_does_not_change_what_it_is_given():
    environ = {"SLURM_JOB_ID": "1"}
    scrub(environ)
    assert environ == {"SLURM_JOB_ID": "1"}


def test_what_an_agent_gives_its_ranks_reaches_no_other_job():
    own = ["RESTART_COUNT", "SECRET", "HEARTBEAT_FD", "CHANNEL_FD", "MEMORY_FDS", "IMPORTS_S"]
    assert scrub({f"SLURMDDP_{name}": "1" for name in own}) == {}
