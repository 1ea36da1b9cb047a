#!/bin/bash
# Stands in for the interpreter of a job: called as `stub-agent.sh -m slurmddp.launchers.agent RUN_DIR`, it
# counts to the number in RUN_DIR/goal, five a second, and stops at a "checkpoint" on TERM or USR2.
# STUB_CRASH=N crashes after N steps and a save, STUB_STUCK=1 saves nothing.
# STUB_REPLACED=NODE says at the end, as the first node's agent would, that the ranks went on without that node.
run=$3
stop=""
trap 'stop=TERM' TERM
[ "${STUB_DEAF:-}" = USR2 ] && trap '' USR2 || trap 'stop=USR2' USR2
step=$(cat "$run/checkpoints/latest" 2>/dev/null || echo 0)
echo "node $SLURM_NODEID of $SLURM_STEP_NUM_NODES starts at $step, launcher ${SUBMITIT_EXECUTOR:-none}," \
    "CPUs ${SLURM_CPUS_PER_TASK:-none} of $SLURM_CPUS_ON_NODE"
crash=$((step + ${STUB_CRASH:-1000000}))
while [ "$step" != "$crash" ] && [ "$step" -lt "$(cat "$run/goal")" ] && [ -z "$stop" ]; do
    sleep 0.2
    step=$((step + 1))
done
if [ "$SLURM_NODEID" = 0 ] && [ -n "${STUB_REPLACED:-}" ]; then
    echo "{\"event\": \"continued\", \"attempt\": $SLURMDDP_ATTEMPT, \"without\": [$STUB_REPLACED]}" >>"$run/attempts.jsonl"
fi
if [ "$SLURM_NODEID" = 0 ] && [ -z "${STUB_STUCK:-}" ]; then
    until mkdir -p "$run/checkpoints"; do sleep 0.1; done # a signal for the step ends its commands too
    echo "$step" >"$run/checkpoints/latest"
fi
[ "$step" = "$crash" ] && exit 3
echo "node $SLURM_NODEID ends at $step ${stop:+on $stop}"
[ -n "$stop" ] && code=75 || code=0
echo "$code" >"$run/logs/attempt-$SLURMDDP_ATTEMPT/exit-node-$SLURM_NODEID"
exit "$code"
