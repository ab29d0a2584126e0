"""A Hugging Face `Trainer` on a mount: one optimizer step per step of the lake, and an exact resume.

    stepfs mount LAKE MOUNT --steps 0:12 --group hf --checkpoint-dir OUTPUT
    python train_huggingface.py MOUNT OUTPUT                    # or torchrun --nproc-per-node 2 …

`--steps` lists exactly these steps from the start, also those that are not committed yet: the length of the data set
is known and equal on every node, and opening a file that is not there yet waits. Item i of the data set is file
i % ranks of step i // ranks, so that an optimizer step of the whole job takes one step, on any number of processes that
divides the ranks. Therefore `checkpoint-N` resumes at step N, which is what `--checkpoint-dir` records in the lake.

Prints each file as it is opened, and the trainer's losses. Run again after any ending: it resumes from the newest
checkpoint that is complete, and opens only the files behind it.
"""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

mount, output = Path(sys.argv[1]), Path(sys.argv[2])


class Files(torch.utils.data.Dataset):
    """All files of all steps, in the order of the lake."""

    def __init__(self):
        self.paths = sorted(mount.glob("step-*/rank-*.safetensors"))
        self.ranks = len({path.name for path in self.paths})

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        print(f"opens {path.parent.name}/{path.name}", flush=True)
        batch = load_file(path)
        # Models of transformers shift labels themselves, so they get the tokens; -100 leaves padding out.
        return {
            "input_ids": batch["input_ids"],
            "labels": torch.where(batch["doc_ids"] < 0, -100, batch["input_ids"]),
        }


class InOrder(Trainer):
    """The steps in the order in which they were committed; Trainer's own choice is a random one."""

    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.SequentialSampler(train_dataset or self.train_dataset)


files = Files()
shape = LlamaConfig(
    vocab_size=258,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=256,
)
settings = TrainingArguments(
    output_dir=str(output),
    num_train_epochs=1,
    per_device_train_batch_size=1,  # a file is a batch already
    gradient_accumulation_steps=files.ranks // int(os.environ.get("WORLD_SIZE", "1")),
    dataloader_pin_memory=torch.cuda.is_available(),
    save_steps=4,
    save_total_limit=2,
    logging_steps=1,
    disable_tqdm=True,
    report_to="none",
)
model = LlamaForCausalLM(shape)
trainer = InOrder(model, settings, train_dataset=files, data_collator=lambda items: items[0])
complete = [path.parent for path in output.glob("checkpoint-*/trainer_state.json")]  # which is written last
newest = max(complete, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
trainer.train(resume_from_checkpoint=newest and str(newest))
