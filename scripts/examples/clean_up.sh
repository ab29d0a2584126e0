#!/usr/bin/env bash
# After a run: record its last checkpoint, take the mount away, delete what nobody needs, and at last the lake itself.
#
#     bash clean_up.sh LAKE MOUNT GROUP NEXT     # NEXT: the step at which the last checkpoint resumes
#
# Prints what each command did. Every command may be repeated.
set -euo pipefail
lake=$1 mount=$2 group=$3 next=$4

stepfs unmount "$mount" --checkpoint "$next"                    # returns when mount, daemon and cache are gone
stepfs checkpoint "$lake" --group "$group" "$next" --keep 1     # of its checkpoints, only this one is still wanted
stepfs seal "$lake"                                             # no more steps: readers that wait get ENOENT in place of a wait
stepfs reclaim "$lake" --dry-run --grace 0s                     # counts what lies behind the oldest kept checkpoint
stepfs reclaim "$lake" --grace 0s                               # deletes it; without --grace an hour after the checkpoint

# When the run is over for good: the group no longer needs anything, and the lake is only its objects.
stepfs retire-group "$lake" "$group"
case $lake in
    file://*) rm -r "${lake#file://}" ;;
    s3://*) echo "delete the objects with the tool of your store: aws s3 rm --recursive $lake" ;;
esac
