#!/usr/bin/env bash
# What is in a lake, who made it, and what its mount is doing. Changes nothing.
#
#     bash look_inside.sh LAKE MOUNT STEP
#
# Prints one answer after another, for people. With --json, each of the first four is one JSON document (fs/JSON.md).
set -euo pipefail
lake=$1 mount=$2 step=$3

stepfs status "$lake"                     # how far its producers, groups and mounts are
stepfs status "$mount"                    # what this node's daemon is doing: rates, cache, store
stepfs ls "$lake" --step "$step"          # the files of one step
stepfs show "$lake" --step "$step"        # the arrays of the first of them, and a few values

ls -l "$mount/step-$(printf %09d "$step")/"   # the same step, as a training program sees it
cat "$mount/.stepfs/steps/$step.json"     # who committed it, when, from which position; its object and checksums
