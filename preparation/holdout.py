"""Held-out rows: which ones, and whether the training rows give them away."""

import hashlib
from collections.abc import Callable

import numpy as np

NEAR = 0.75  # Jaccard similarity of character trigrams from which two questions are called nearly the same
# MinHash with banding (Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, section 3.4): two questions of
# similarity s share a band with probability 1 - (1 - s^4)^20, that is 0.9995 at 0.75 and 0.15 at 0.3.
BANDS, ROWS_PER_BAND = 20, 4
CANDIDATES = 5  # training rows compared in full with one held-out row: those with most bands in common


def question_hash(question: str, seed: int) -> int:
    """64 bits that place a normalised question; another seed holds out other questions."""
    return int.from_bytes(hashlib.blake2b(question.encode(), digest_size=8, key=str(seed).encode()).digest(), "little")


def choose_held_out(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Mask (rows,) bool of the round(fraction × rows) rows with the smallest hashes; `hashes` is (rows,) uint64.

    Rows of equal hash ask the same and stay together: a group that no longer fits is passed over and the next ones are
    tried, so the size is exact unless no such choice is left; then it is smaller.
    """
    room = round(fraction * len(hashes))
    values, group, sizes = np.unique(hashes, return_inverse=True, return_counts=True)
    chosen = np.zeros(len(values), dtype=bool)
    for position, size in enumerate(sizes.tolist()):
        if room == 0:
            break
        if size <= room:
            chosen[position] = True
            room -= size
    return chosen[group.reshape(-1)]


def sketch(questions: list[str]) -> np.ndarray:
    """Band hashes (questions, BANDS) uint32: questions whose trigrams are alike have some of them in common."""
    characters = np.frombuffer("".join(f"\0{text}\0" for text in questions).encode("utf-32-le"), dtype=np.uint32)
    sizes = np.array([len(text) + 2 for text in questions])
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    wide = characters.astype(np.uint64)
    constants = np.random.RandomState(0).randint(
        1, 2**62, size=3 + 2 * BANDS * ROWS_PER_BAND, dtype=np.uint64
    ) | np.uint64(1)
    trigrams = np.zeros(len(wide), dtype=np.uint64)
    trigrams[:-2] = wide[:-2] * constants[0] + wide[1:-1] * constants[1] + wide[2:] * constants[2]
    # The last two positions of a question would reach into the next one: they repeat its first trigram instead.
    for back in (1, 2):
        ends = starts + sizes - back
        trigrams[ends] = trigrams[starts]
    trigrams ^= trigrams >> np.uint64(29)
    signature = np.empty((BANDS * ROWS_PER_BAND, len(questions)), dtype=np.uint64)
    for row in range(len(signature)):
        mixed = (trigrams * constants[3 + 2 * row] + constants[4 + 2 * row]) >> np.uint64(32)
        signature[row] = np.minimum.reduceat(mixed, starts)
    bands = np.zeros((BANDS, len(questions)), dtype=np.uint64)
    for row in range(ROWS_PER_BAND):
        bands = (bands ^ signature[row::ROWS_PER_BAND]) * constants[0]
        bands ^= bands >> np.uint64(31)
    return (bands >> np.uint64(16)).astype(np.uint32).T


def similarity(one: str, other: str) -> float:
    """Jaccard similarity, 0 to 1, of two normalised questions' character trigrams."""
    a, b = ({text[i : i + 3] for i in range(len(text) - 2)} for text in (f"\0{one}\0", f"\0{other}\0"))
    return len(a & b) / max(len(a | b), 1)


def find_near(
    held_out: np.ndarray, bands: np.ndarray, read_questions: Callable[[np.ndarray], list[str]]
) -> list[tuple[int, int, float]]:
    """(held-out row, most similar training row, similarity) where that is at least NEAR.

    `held_out` is the mask (rows,), `bands` the sketch (rows, BANDS), `read_questions` gives the normalised questions of
    some rows. Work and memory grow with the held-out rows, not with all pairs.
    """
    rows = len(held_out)
    tested, train = np.flatnonzero(held_out), np.flatnonzero(~held_out)
    if not len(tested) or not len(train):
        return []
    pairs, shared = np.unique(np.concatenate([_pairs(tested, train, band) for band in bands.T]), return_counts=True)
    row, other = np.divmod(pairs, rows)
    order = np.lexsort((other, -shared, row))
    row, other = row[order], other[order]
    close = np.arange(len(row)) - np.searchsorted(row, row) < CANDIDATES
    row, other = row[close], other[close]
    needed = np.unique(np.concatenate([row, other]))
    text = dict(zip(needed.tolist(), read_questions(needed)))
    best: dict[int, tuple[int, float]] = {}
    for one, two in zip(row.tolist(), other.tolist()):
        score = similarity(text[one], text[two])
        if score >= NEAR and score > best.get(one, (0, 0.0))[1]:
            best[one] = (two, score)
    return [(one, two, score) for one, (two, score) in best.items()]


def _pairs(tested: np.ndarray, train: np.ndarray, band: np.ndarray) -> np.ndarray:
    """held-out row × rows + training row, (pairs,) int64, where both have this band; at most CANDIDATES a held-out row."""
    order = train[np.argsort(band[train], kind="stable")]
    values = band[order]
    low, high = np.searchsorted(values, band[tested], "left"), np.searchsorted(values, band[tested], "right")
    counts = np.minimum(high - low, CANDIDATES)
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(tested, counts) * len(band) + order[np.repeat(low, counts) + offsets]
