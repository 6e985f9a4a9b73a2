"""The loss of each held-out row, sharded over the ranks, the same for any number of them; in training and evaluation."""

import numpy as np
import torch
from accelerate.utils import send_to_device

from sft.batching import collate, deal_by_tokens


def row_nll(model: torch.nn.Module, dataset, accelerator, tokens_per_batch: int, progress=None) -> np.ndarray:
    """Σ nats over the target tokens of each row, (rows,) float64, equal on all ranks and for any number of them.

    model: a `TargetLoss`, prepared or not. Rows are dealt to ranks and packed up to tokens_per_batch tokens (a longer
    row goes alone). `progress`, if any, is a bar over the rows of all ranks. Each rank fills its rows of a vector of zeros and one all-reduce adds them: no row is counted
    twice, no order is lost, and float32 sums with zeros are exact.
    """
    lengths = np.asarray(dataset["length"], dtype=np.int64)
    ranks = accelerator.num_processes
    share = deal_by_tokens(range(len(lengths)), lengths, ranks, len(lengths))
    batches = [pack(rows, lengths, tokens_per_batch) for rows in share]
    mine = batches[accelerator.process_index]
    sums = torch.zeros(len(lengths), dtype=torch.float32)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for index in range(max(len(rank_batches) for rank_batches in batches)):  # as many forwards on each rank
            rows = mine[index] if index < len(mine) else []
            batch = send_to_device(collate([dataset[row] for row in rows]), accelerator.device)
            nll = model(**batch).float().cpu()
            owner = np.repeat(np.arange(len(rows)), [int(dataset[row]["target_tokens"]) for row in rows])
            for position, row in enumerate(rows):
                sums[row] = nll[torch.from_numpy(owner == position)].double().sum()
            if progress is not None:
                progress.update(sum(len(done) for rank_batches in batches for done in rank_batches[index : index + 1]))
    model.train(was_training)
    total = accelerator.reduce(sums.to(accelerator.device), reduction="sum")
    return total.cpu().double().numpy()


def pack(rows: list[int], lengths: np.ndarray, tokens_per_batch: int) -> list[list[int]]:
    """Rows cut into lists of at most tokens_per_batch tokens, in their order; a longer row stands alone."""
    batches: list[list[int]] = []
    tokens = 0
    for row in rows:
        if batches and tokens + lengths[row] <= tokens_per_batch:
            batches[-1].append(row)
            tokens += lengths[row]
        else:
            batches.append([row])
            tokens = lengths[row]
    return batches
