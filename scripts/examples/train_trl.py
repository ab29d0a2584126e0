"""trl's `SFTTrainer` on rows that a plan has made: it prepares nothing, and learns the labels that it is given.

    python train_trl.py LAKE OUTPUT STOP

One optimizer step takes one step of the lake. A run that goes on reads from the step of its newest checkpoint:
`ignore_data_skip`, for else it would read, and leave out, all that came before. Prints `step N CRC` for each micro-batch.
"""

import sys
import zlib
from pathlib import Path

import datasets
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from stepfs import StepDataset


def rows(url, start, stop):
    """All rows of a step in one item, with the labels that transformers shifts by itself."""
    for step, batches in enumerate(StepDataset(url, rank=0, mesh="dp=1", start=start, stop=stop, iterable=True), start):
        arrays = {
            name: torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels", "position_ids")
        }
        shifted = torch.full_like(arrays["labels"], -100)
        shifted[:, 1:] = arrays["labels"][:, :-1]
        yield arrays | {"labels": shifted, "step": step}


def taken(items):
    """The collator, which gets what is trained on."""
    [item] = items
    for row in item["input_ids"]:
        print(f"step {item['step']} {zlib.crc32(row.numpy().tobytes()):08x}", flush=True)
    return {name: value for name, value in item.items() if name != "step"}


url, output, stop = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
last = get_last_checkpoint(output) if output.exists() else None
start = int(last.rpartition("-")[2]) if last else 0
shape = LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
settings = SFTConfig(
    output_dir=str(output), max_steps=stop, save_steps=1, save_total_limit=2, ignore_data_skip=True, report_to="none",
    per_device_train_batch_size=1, dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False,
    accelerator_config={"dispatch_batches": False}, disable_tqdm=True, use_cpu=True, bf16=False,
)  # fmt: skip
steps = datasets.IterableDataset.from_generator(rows, gen_kwargs={"url": url, "start": start, "stop": stop})
trainer = SFTTrainer(
    LlamaForCausalLM(shape), settings, train_dataset=steps, data_collator=taken,
    processing_class=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()), pad_token="<pad>", eos_token="<eos>"),
)  # fmt: skip
trainer.train(resume_from_checkpoint=last)
