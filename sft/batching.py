"""Which rows make up optimizer step k, and how they are laid over ranks and micro-batches.

The first is a pure function of (seed, epoch, number of rows, global batch size); only the second knows how many cards
there are. So every card count sees the same steps, and a run can go on with another one.
"""

import bisect
import functools
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sft.errors import UserError


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """A permutation of range(rows), (rows,) int64. Raw PCG64 words are sorted: their stream is fixed by NumPy's
    compatibility policy (NEP 19), which `Generator.permutation` is not."""
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(rows), kind="stable")


Sized = tuple[int, int]  # (tokens, row)


def longest_first(rows: Sequence[int], lengths: np.ndarray) -> list[Sized]:
    """The rows with their tokens, by falling tokens, then rising row."""
    rows = np.asarray(rows, dtype=np.int64)
    tokens = lengths[rows]
    order = np.lexsort((rows, -tokens))
    return list(zip(tokens[order].tolist(), rows[order].tolist()))


def deal_by_tokens(rows: Sequence[int], lengths: np.ndarray, bins: int, capacity: int) -> list[list[int]]:
    """Rows dealt into `bins` lists of at most `capacity` rows with token sums as even as greedy dealing gets them.

    The result depends on nothing but the arguments. Bins may stay empty.
    """
    return [[row for _, row in dealt] for dealt in deal(longest_first(rows, lengths), bins, capacity)]


def deal(rows: list[Sized], bins: int, capacity: int) -> list[list[Sized]]:
    """Rows, longest first, each to the emptiest bin that has room, ties to the first (LPT rule, Graham 1969)."""
    dealt: list[list[Sized]] = [[] for _ in range(bins)]
    emptiest = [(0, place) for place in range(bins)]  # a heap of the bins that have room
    for sized in rows:
        held, place = emptiest[0]
        dealt[place].append(sized)
        if len(dealt[place]) < capacity:
            heapq.heapreplace(emptiest, (held + sized[0], place))
        else:
            heapq.heappop(emptiest)
    return dealt


def fill(rows: list[Sized], limit: int) -> list[list[Sized]]:
    """Rows, longest first, in few lists of at most `limit` tokens: each to the fullest one that has room for it.

    At most 11/9 of the fewest lists possible (best fit decreasing, Johnson 1974). A longer row stands alone.
    """
    filled: list[list[Sized]] = []
    room: list[tuple[int, int]] = []  # (tokens that still fit, list), ascending
    for sized in rows:
        found = bisect.bisect_left(room, (sized[0], 0))
        if found == len(room):
            filled.append([])
            left, place = limit, len(filled) - 1
        else:
            left, place = room.pop(found)
        filled[place].append(sized)
        bisect.insort(room, (left - sized[0], place))
    return filled


@dataclass(frozen=True)
class BatchPlan:
    """The rows of each optimizer step (counted from 0) and their layout over ranks.

    lengths, target_tokens: (rows,) tokens per row of the training split.
    micro_batch_limit: tokens that a card computes at once; 0: as many as the longest rows of a per-device batch have.
    """

    lengths: np.ndarray
    target_tokens: np.ndarray
    seed: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    world_size: int
    micro_batch_limit: int = 0

    @property
    def global_batch_size(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.lengths) / self.global_batch_size)

    def rows(self, step: int) -> list[int]:
        """The rows of one step; fewer than the global batch in an epoch's last step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = epoch_order(self.seed, epoch, len(self.lengths))
        return order[position * self.global_batch_size : (position + 1) * self.global_batch_size].tolist()

    @functools.cached_property
    def micro_batch_tokens(self) -> int:
        """Tokens that a micro-batch may have: the limit, in which the longest row must fit, or those of the longest
        per-device batch that there can be, which has to fit."""
        longest = np.sort(self.lengths)
        if self.micro_batch_limit:
            return max(int(longest[-1]), self.micro_batch_limit)
        return int(longest[-self.per_device_train_batch_size :].sum())

    def layout(self, step: int) -> list[list[list[int]]]:
        """[micro-batch][rank] → rows. Ranks get even token sums, then each rank's micro-batches do; some may be empty.

        Rows share a micro-batch as long as it stays within `micro_batch_tokens`: a forward of four short rows costs what
        one costs. So there are as few micro-batches as that allows, on all ranks the same number; without a limit
        gradient_accumulation_steps at most.
        """
        return self._layouts(step)

    @functools.cached_property
    def _layouts(self) -> Callable[[int], list[list[list[int]]]]:
        """`layout` that remembers: sampler, loop and log ask for the same few steps."""
        return functools.lru_cache(maxsize=8)(self._lay_out)

    def _lay_out(self, step: int) -> list[list[list[int]]]:
        size, most, limit = self.per_device_train_batch_size, self.gradient_accumulation_steps, self.micro_batch_tokens
        by_rank = deal(longest_first(self.rows(step), self.lengths), self.world_size, size * most)
        filled = [fill(rows, limit) for rows in by_rank]
        count = max(1, max(map(len, filled)))
        if not self.micro_batch_limit and count >= most:  # greedy filling is not perfect, but these fit for certain
            count = most
            laid = [deal(rows, count, size) for rows in by_rank]
        else:
            laid = [deal(rows, count, size * most) for rows in by_rank]
            for rank, bins in enumerate(laid):  # even token sums, unless those do not fit
                if max(sum(tokens for tokens, _ in sized) for sized in bins) > limit:
                    laid[rank] = filled[rank] + [[] for _ in range(count - len(filled[rank]))]
        return [[[row for _, row in bins[m]] for bins in laid] for m in range(count)]

    def target_count(self, step: int) -> int:
        """Target tokens of a step over all ranks: the denominator of its loss, known without asking the other ranks."""
        return int(self.target_tokens[self.rows(step)].sum())

    def rank_tokens(self, step: int) -> list[int]:
        """Tokens per rank in a step, to see how even the work is."""
        layout = self.layout(step)
        return [sum(int(self.lengths[m[rank]].sum()) for m in layout) for rank in range(self.world_size)]


def resolve_batch_size(
    per_device: int, accumulation: int | None, global_batch_size: int | None, world_size: int
) -> tuple[int, int]:
    """(accumulation, global batch size) such that global = per-device batch × accumulation × world size.

    Raises: UserError with the nearest valid values when the global batch does not divide, or when all three are given
    and disagree.
    """
    rows_at_once = per_device * world_size
    if global_batch_size is None:
        return accumulation or 1, rows_at_once * (accumulation or 1)
    if global_batch_size % rows_at_once:
        below, above = (
            global_batch_size // rows_at_once * rows_at_once,
            -(-global_batch_size // rows_at_once) * rows_at_once,
        )
        nearest = " or ".join(str(value) for value in (below, above) if value)
        raise UserError(
            f"global_batch_size {global_batch_size} is not a multiple of per_device_train_batch_size {per_device} × "
            f"world size {world_size} = {rows_at_once}; the nearest that are: {nearest}"
        )
    if accumulation is not None and accumulation * rows_at_once != global_batch_size:
        raise UserError(
            f"global_batch_size {global_batch_size} ≠ per_device_train_batch_size {per_device} × "
            f"gradient_accumulation_steps {accumulation} × world size {world_size} = {accumulation * rows_at_once}; "
            "leave gradient_accumulation_steps out to have it derived"
        )
    return global_batch_size // rows_at_once, global_batch_size


@dataclass(frozen=True)
class StepSampler:
    """Yields the micro-batches of steps [first, last) in the order step → micro-batch → rank.

    As a `batch_sampler` that Accelerate shards it hands each rank its own: batch i goes to rank i modulo world size.
    One sampler covers all epochs, so nothing has to be skipped or re-seeded when a run goes on from its middle.
    """

    plan: BatchPlan
    first: int
    last: int

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first, self.last):
            for micro_batch in self.plan.layout(step):
                yield from micro_batch


def collate(rows: list[dict], pad_to_multiple_of: int = 1, pin: bool = False) -> dict:
    """Packs rows ({"input_ids", "labels"}, 1-D each) into the arguments of `TargetLoss.forward`.

    Rows stand one after another without padding. A label counts at the position before it (labels are not shifted in
    the data set). A length to round up to a multiple gives a last segment of zeros without targets. No rows give two
    zeros with one target that does not count (`counted`), as cards were never tried with tensors of no elements.
    pin: in memory from which a card fetches by itself, while the host goes on.
    """
    counted = bool(rows)
    rows = rows or [{"input_ids": [0, 0], "labels": [-100, 0]}]
    lengths = [len(row["input_ids"]) for row in rows]
    total = sum(lengths)
    rounded = -(-total // pad_to_multiple_of) * pad_to_multiple_of
    if rounded > total:
        lengths.append(rounded - total)
    input_ids = np.zeros(rounded, dtype=np.int64)
    labels = np.full(rounded + 1, -100, dtype=np.int64)
    starts = np.cumsum([0, *lengths])
    for start, row in zip(starts, rows):
        input_ids[start : start + len(row["input_ids"])] = row["input_ids"]
        labels[start : start + len(row["labels"])] = row["labels"]
        labels[start] = -100  # nothing predicts a row's first token
    targets = np.flatnonzero(labels != -100)
    tensors = {
        "input_ids": torch.from_numpy(input_ids)[None],
        "position_ids": torch.from_numpy(np.concatenate([np.arange(n, dtype=np.int64) for n in lengths]))[None],
        "target_positions": torch.from_numpy(targets - 1),
        "target_ids": torch.from_numpy(labels[targets]),
        "cu_seq_lens": torch.from_numpy(starts.astype(np.int32)),
    }
    if pin:
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    return {**tensors, "segment_lengths": tuple(lengths), "counted": counted}
