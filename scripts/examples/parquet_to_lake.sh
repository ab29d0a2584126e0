#!/usr/bin/env bash
# A Parquet data set becomes a lake, by a plan: shares in tokens, packed rows, every step balanced over its ranks.
#
#     bash parquet_to_lake.sh LAKE
#
# Works in the current directory: writes a small data set (questions/ and stories/, a text column each) and plan.yaml,
# and runs the plan. After any ending it continues exactly when it is run again.
# Prints shares, fill and balance of the steps that it has committed.
set -euo pipefail
lake=$1

python - <<'END'
import pathlib
import pyarrow, pyarrow.parquet

def write(name, text):  # in two files of two row groups each
    pathlib.Path(name).mkdir(exist_ok=True)
    for part in range(2):
        table = pyarrow.table({"id": range(600), "body": [text(600 * part + row) for row in range(600)]})
        pyarrow.parquet.write_table(table, f"{name}/part-{part}.parquet", row_group_size=300)

write("questions", lambda n: f"What is {n} times {n % 7}? It is {n * (n % 7)}. ")
write("stories", lambda n: f"Day {n}. " + f"The {n % 13}th bird sang, and somebody counted it. " * (n % 40))
END

cat > plan.yaml <<'END'
version: 1
output:
  ext: .safetensors
  mesh: "dp=2"              # the trainer's own
  sequence_length: 512
  micro_batches: 2          # per rank and step
tokenizer: {kind: bytes}    # a model's own: {kind: huggingface, file: tokenizer.json}
sources:
  questions: {format: parquet, files: questions/, text_field: body}
  stories:   {format: parquet, files: stories/, text_field: body}
mix: {questions: 40, stories: 60}
until: {steps: 24}
END

stepfs-produce run plan.yaml "$lake" --workers 1
