#!/bin/bash
# Counts to 60, a step a second, and saves when it gets SIGTERM. All it uses of forge is the job's
# directory in FORGE_JOB_DIR, and exit code 75, which means "checkpointed, run me again".
#
#   forge exec -- examples/save_in_trap.sh 60
#   forge exec hydra/launcher=slurm -- examples/save_in_trap.sh 60

checkpoint=$FORGE_JOB_DIR/step.txt
step=$(cat "$checkpoint" 2> /dev/null || echo 0)
echo "starts at step $step"

save() {
  echo "$step" > "$checkpoint.new" && mv "$checkpoint.new" "$checkpoint"
  echo "saved step $step"
}
trap 'save; exit 75' TERM

while [ "$step" -lt "${1:-60}" ]; do
  sleep 1 & wait $!  # in the foreground, a trap would have to wait for its end
  step=$((step + 1))
done
save
