#!/usr/bin/env bash
# WebDataset shards become a lake, by a plan.
#
#     bash webdataset_to_lake.sh LAKE
#
# Works in the current directory. Writes three small shards and captions.yaml, checks the plan, and runs it. Prints what the
# plan amounts to, and the steps that were committed.
set -euo pipefail
lake=$1

mkdir -p shards
python - <<'END'
import json
import webdataset

with webdataset.ShardWriter("shards/%04d.tar", maxcount=200, verbose=0) as shards:
    for number in range(600):
        caption = f"Picture {number}: " + ", ".join(["a tree", "a house", "a cloud"][: 1 + number % 3]) + "."
        shards.write({"__key__": f"{number:06d}", "txt": caption, "json": json.dumps({"width": 64 + number})})
END

cat > captions.yaml <<'END'
version: 1
output: {ext: .npy, mesh: "dp=2", sequence_length: 256, micro_batches: 2}
tokenizer: {kind: bytes}
sources:
  captions:
    format: webdataset
    files: shards/
    text_field: txt
    epochs: 2
    on_error: {do: skip, at_most: 1%}
mix: {captions: 1}
END

stepfs-produce check captions.yaml
stepfs-produce run captions.yaml "$lake" --workers 1
