"""The pieces of context parallelism, as Megatron-core cuts them: each document by its rule for a batch of one sequence.

Its own code for packed rows is Transformer Engine's, which needs a GPU; the rule is the same, document by document.
"""

from __future__ import annotations

import nightly
import numpy as np
import pytest
import torch

from stepfs.torch import context_parallel_part


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_rank_gets_the_pieces_that_megatron_gives_it(ranks, monkeypatch):
    nightly.needs("megatron.core")
    from megatron.core import parallel_state, utils  # noqa: PLC0415

    draw = np.random.default_rng(ranks)
    lengths = 2 * ranks * draw.integers(1, 20, 9)
    batch = {
        "input_ids": torch.from_numpy(draw.integers(0, 50_000, (1, lengths.sum()))),
        "position_ids": torch.cat([torch.arange(length) for length in lengths.tolist()])[None],
        "cu_seqlens": torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])),
    }
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: ranks)
    for rank in range(ranks):
        monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda rank=rank: rank)
        ours = context_parallel_part(batch, rank, ranks)
        for name in ("input_ids", "position_ids"):
            documents = batch[name].split(lengths.tolist(), 1)
            theirs = [utils.get_batch_on_this_cp_rank({name: document})[name] for document in documents]
            assert torch.equal(ours[name], torch.cat(theirs, 1))
