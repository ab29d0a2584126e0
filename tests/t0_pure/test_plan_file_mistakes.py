"""Each mistake in a plan file has its place, and says what to do."""

from __future__ import annotations

import pytest
from test_plan_file import COMPLETE, OUTPUT, SOURCES, refusal

COLUMNS = "output: {mesh: dp=2, sequence_length: 8, columns: {pixels: {dtype: uint8, shape: [588]}}}\n"
CALLED = "sources: {a: {format: parquet, files: x, transform: 'm:f'}}\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "1:1: 'output' is missing"),
        ("- 1\n", "1:1: write keys and values, such as {output: {…}, sources: {…}, mix: {…}}"),
        ("plan\n", "1:1: write keys and values, such as {output: {…}, sources: {…}, mix: {…}}"),
        (OUTPUT + "sources: {}\n", "2:10: sources: no source; declare at least one"),
        (OUTPUT + "sources:\n", "2:9: sources: write keys and values, such as {name: …}"),
        (
            OUTPUT + "sources: {a: x}\n",
            "2:14: sources.a: write keys and values, such as {format: jsonl, files: /data/web/}",
        ),
        (
            OUTPUT + 'sources: {"": {format: text, files: x}}\n',
            "2:11: sources: '' is no name of a source; use 1 to 200",
        ),
        (
            OUTPUT + "sources: {a: {format: text, files: []}}\n",
            "2:36: sources.a.files: a list names no files",
        ),
        (
            OUTPUT + "sources: {a: {format: text, files: [x, {}]}}\n",
            "2:36: sources.a.files: a mapping is no file name",
        ),
        (OUTPUT + "sources: {a: {files: x}}\n", "2:14: sources.a: 'format' is missing"),
        (
            OUTPUT + "sources: {a: {format: text, files: x, text_field: y}}\n",
            "2:39: sources.a: unknown key 'text_field'",
        ),
        (
            OUTPUT + "sources: {a: {format: 'm:C d', files: x}}\n",
            "2:23: sources.a.format: 'm:C d' names no class",
        ),
        (
            OUTPUT + "sources: {a: {format: parquet, files: x, mask_field: m}}\n",
            "2:54: sources.a.mask_field: mask_field stands",
        ),
        (
            "output: {mesh: dp=2, sequence_length: 8, files: rows}\n" + SOURCES,
            "1:49: output.files: unknown kind of files 'rows'; known: micro_batches, ranks",
        ),
        (
            "output: {mesh: dp=128, sequence_length: 8, micro_batches: 129, files: micro_batches}\n"
            + SOURCES,
            "1:59: output.micro_batches: a step of 16512 files (ranks × micro_batches) is too large; the most is 16384",
        ),
        (
            COLUMNS.replace("uint8", "int4") + CALLED,
            "1:68: output.columns.pixels.dtype: unknown dtype 'int4'; did you mean 'int64'?",
        ),
        (
            COLUMNS.replace("[588]", "588") + CALLED,
            "1:82: output.columns.pixels.shape: '588' is no shape; write at most 8 sizes, such as [588]",
        ),
        (
            COLUMNS.replace("[588]", "[4096, 4097]") + CALLED,
            "1:82: output.columns.pixels.shape: a row of 16781312 bytes; the most is 16777216",
        ),
        (
            COLUMNS.replace("pixels", "labels") + CALLED,
            "1:52: output.columns: 'labels' is no name of a column; use up to 24 of a-z, 0-9 and _, and none of the fi",
        ),
        (
            COLUMNS.replace("pixels", "grid_counts") + CALLED,
            "1:52: output.columns: 'grid_counts' is no name of a column",
        ),
        (
            COLUMNS.replace("{mesh", "{ext: .npy, mesh") + CALLED,
            "1:53: output: .npy files have no room for columns; choose .safetensors, .pt or .tar",
        ),
        (
            COLUMNS + SOURCES,
            "1:42: output: no source has a transform that could give columns; add transform: module:function to one",
        ),
        (
            COLUMNS + CALLED + "pack: concat\n",
            "3:7: pack: concat cuts documents, and a sample with rows in a column is never cut; use best_fit",
        ),
        (
            COLUMNS + CALLED + "cost: {hidden_size: 64, columns: {pixel: 3}}\n",
            "3:35: cost.columns: unknown column 'pixel'; did you mean 'pixels'?",
        ),
        (
            OUTPUT + CALLED + "cost: {columns: {pixels: 3}}\n",
            "3:18: cost.columns: unknown column 'pixels'; declare it: output: {columns: {pixels: {dtype: uint8, shape: [588]}}}",
        ),
        (
            COLUMNS + CALLED + "cost: {columns: {pixels: -3}}\n",
            "3:26: cost.columns.pixels: '-3' is no whole number",
        ),
        (
            COLUMNS + CALLED + "cost: {call: 'm:f', columns: {pixels: 3}}\n",
            "3:21: cost: call gives the whole cost of a sample; remove one",
        ),
        (
            COLUMNS + CALLED + "balance: {loads: [tokens, pixel]}\n",
            "3:27: balance.loads[1]: unknown load 'pixel'; did you mean 'pixels'?",
        ),
        (
            COLUMNS + CALLED + "balance: {loads: [pixels]}\n",
            "3:18: balance.loads: name several different loads, such as [tokens, pixels]; a single one is what cost says",
        ),
        (
            COLUMNS + CALLED + "balance: {method: greedy, loads: [tokens, pixels]}\n",
            "3:19: balance.method: loads are balanced by a method of their own; remove method",
        ),
        (
            COLUMNS + "sources: {a: {format: parquet, files: x, images: jpg}}\n",
            "2:50: sources.a.images: images need a transform to put them into a sample; add transform: module:function",
        ),
        (
            COLUMNS + "sources: {a: {format: jsonl, files: x, transform: 'm:f', images: jpg}}\n",
            "2:58: sources.a: unknown key 'images'",
        ),
        (
            COLUMNS + CALLED.replace("}}", ", images: {fields: jpg, patches_max: 3}}}"),
            "2:95: sources.a.images.patches_max: less than the 4 patches that are merged",
        ),
        (
            "output: {mesh: dp=8193, sequence_length: 8, columns: {pixels: {dtype: uint8, shape: [1], file: own}}}\n"
            + CALLED,
            "1:54: output.columns: a step of 16386 files (ranks × 1 and columns with file: own) is too large; the most is",
        ),
        (
            COMPLETE + "mix: {a: 0}\n",
            "3:6: mix: all weights are zero; give at least one source a positive weight",
        ),
        (COMPLETE + "mix: {a: 1, b: 2}\n", "3:13: mix: unknown source 'b'; known: a"),
        (COMPLETE + "mix: {a: 1e3}\n", "3:10: mix.a: '1e3' is no weight"),
        (COMPLETE + "mix: [{ramp_to: 5, weights: {a: 1}}]\n", "3:8: mix[0]: a ramp needs an entry before it"),
        (
            COMPLETE + "mix: [{from: 5, weights: {a: 1}}]\n",
            "3:14: mix[0].from: the first entry begins at 0, not at 5",
        ),
        (
            COMPLETE + "mix: [{weights: {a: 1}}, {weights: {a: 1}}]\n",
            "3:26: mix[1]: say when its weights hold",
        ),
        (
            COMPLETE + "mix: [{weights: {a: 1}}, {from: 0, weights: {a: 1}}]\n",
            "3:33: mix[1].from: step 0 does not come",
        ),
        (
            COMPLETE + "mix: [{weights: {a: 1}}, {from: 9, ramp_to: 9, weights: {a: 1}}]\n",
            "3:36: mix[1]: give one of from",
        ),
        (COMPLETE + "mix: [{from: 0}]\n", "3:7: mix[0]: 'weights' is missing"),
        (COMPLETE + "mix: 3\n", "3:6: mix: write a list, such as [a, b]"),
        (COMPLETE + "stages: [{sequence_length: 8}]\n", "3:1: give one of output.sequence_length and stages"),
        (
            "output: {mesh: dp=1}\n" + SOURCES,
            "1:9: output: sequence_length is missing; add sequence_length: 4096, or stages",
        ),
        (
            "output: {mesh: dp=1, micro_batch_tokens: 4096}\nstages: [{sequence_length: 3000}]\n" + SOURCES,
            "2:28: stages[0].sequence_length: sequence_length 3000 does not divide micro_batch_tokens 4096",
        ),
        (
            "output: {mesh: dp=1}\nstages: [{from: 3, sequence_length: 8}]\n" + SOURCES,
            "2:17: stages[0].from: the first stage begins at 0, not at 3",
        ),
        (
            "output: {mesh: dp=1}\nstages: [{sequence_length: 8}, {from: 0, sequence_length: 8}]\n" + SOURCES,
            "2:39: stages[1].from: step 0 does not come after step 0 of the stage before",
        ),
        (
            OUTPUT + "sources: {a: {format: text, files: x, sequence_length: 16384}}\n",
            "2:56: sources.a.sequence_length: 16384 tokens have no room in the rows of 4096 from step 0 on; choose at most 4096",
        ),
        (
            OUTPUT + "sources: {a: {format: text, files: x, sequence_length: 3000}}\n",
            "2:56: sources.a.sequence_length: 3000 does not divide the rows of 4096 from step 0 on, so their ends would",
        ),
        (
            "output: {mesh: dp=1}\nstages: [{sequence_length: 8}, {from: 9, sequence_length: 16, lengths: {a: 5}}]\n"
            + SOURCES,
            "2:76: stages[1].lengths.a: 5 does not divide the rows of 16 from step 9 on, so their ends would stay empty; cho",
        ),
        (
            "output: {mesh: dp=1}\nstages: [{sequence_length: 8, lengths: {aa: 4}}]\n" + SOURCES,
            "2:41: stages[0].lengths: unknown source 'aa'; did you mean 'a'?",
        ),
        (
            "output: {mesh: dp=1}\nstages: [{sequence_length: 8, lengths: {a: 0}}]\n" + SOURCES,
            "2:44: stages[0].lengths.a: 0 is out of range",
        ),
        (
            "output: {mesh: dp=16385, sequence_length: 8}\n" + SOURCES,
            "1:16: output.mesh: its data dimensions make 16385 slices",
        ),
        (
            "output: {mesh: 'pp=2,cp=4', sequence_length: 8}\n" + SOURCES,
            "1:16: output.mesh: it has no data dimension; add one, such as dp=4",
        ),
        (
            "output: {mesh: 'dp=16384,tp=128', sequence_length: 8}\n" + SOURCES,
            "1:16: output.mesh: it has 2097152 ranks; the most is 1048575",
        ),
        (
            "output: {mesh: 'dp=8,dp=8', sequence_length: 8}\n" + SOURCES,
            "1:16: output.mesh: a dimension is named twice",
        ),
        (
            "output: {mesh: 8, sequence_length: 8}\n" + SOURCES,
            "1:16: output.mesh: '8' is no mesh; write it as pp=2,dp=4,tp=2",
        ),
        (
            "output: {mesh: dp=1, sequence_length: 8, ext: pt}\n" + SOURCES,
            "1:47: output.ext: unknown extension 'pt'",
        ),
        (
            "output: {mesh: dp=8192, sequence_length: 1048576}\n" + SOURCES,
            "1:9: output: a step of 8589934592 tokens",
        ),
        (
            OUTPUT + "sources: {a: {format: text, files: x, shard: 2/2}}\n",
            "2:46: sources.a.shard: shard 2/2 does not exist; the first of 2 is 0/2",
        ),
        (
            OUTPUT + "sources: {a: {format: text, files: x, shard: half}}\n",
            "2:46: sources.a.shard: 'half' is no shard; write i/n",
        ),
        (
            OUTPUT + "sources: {a: {format: text, files: x, records: file}}\n",
            "2:48: sources.a.records: unknown kind of records 'file'; did you mean 'files'?",
        ),
        (COMPLETE + "seed: -1\n", "3:7: seed: '-1' is no whole number"),
        (COMPLETE + "seed: 18446744073709551616\n", "3:7: seed: 18446744073709551616 is out of range"),
        (COMPLETE + "cost: {linear: -1}\n", "3:16: cost.linear: '-1' is no whole number"),
        (COMPLETE + "cost: {linear: 0}\n", "3:7: cost: a cost of nothing"),
        (COMPLETE + "cost: {linear: 1.5}\n", "3:16: cost.linear: '1.5' is no whole number"),
        (
            COMPLETE + "cost: {hidden_size: 8, linear: 1}\n",
            "3:7: cost: give one of hidden_size, linear and quadratic, or call",
        ),
        (COMPLETE + "cost: {call: flops}\n", "3:14: cost.call: 'flops' names no function; write module:name"),
        (
            COMPLETE + "tokenizer: tokenizer.json\n",
            "3:12: tokenizer: 'tokenizer.json' is a file; write {kind: huggingface, file: tokenizer.json}",
        ),
        (COMPLETE + "tokenizer: {kind: huggingface}\n", "3:12: tokenizer: kind: huggingface needs a file"),
        (COMPLETE + "tokenizer: {file: x}\n", "3:19: tokenizer.file: kind: bytes has no file"),
        (
            COMPLETE + "defaults: {shuffle: {block: 8MB}}\n",
            "3:29: defaults.shuffle.block: '8MB' is no size; write a number",
        ),
        (
            COMPLETE + "defaults: {shuffle: {block: 1KiB}}\n",
            "3:29: defaults.shuffle.block: '1KiB' is out of range",
        ),
        (
            COMPLETE + "defaults: {holdout: 100%}\n",
            "3:21: defaults.holdout: '100%' is no share; write one below 100%",
        ),
        (COMPLETE + "defaults: {epochs: 0}\n", "3:20: defaults.epochs: '0' is no number of epochs"),
        (
            COMPLETE + "until: {exhausted: first}\n",
            "3:20: until.exhausted: no source ever ends; give one epochs",
        ),
        (
            COMPLETE + "until: {exhausted: all}\n",
            "3:20: until.exhausted: 'a' never ends; give every source epochs",
        ),
        (COMPLETE + "until: 5\n", "3:8: until: write keys and values, such as {steps: 200000}"),
    ],
)
def test_a_mistake_has_its_place_and_says_what_to_do(text, line):
    found = refusal(text)
    assert any(one.startswith(f"plan.yaml:{line}") for one in found), found
