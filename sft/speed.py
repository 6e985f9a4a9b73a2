"""How fast a card could be, and how much of that a step used: peaks from the makers' data sheets, nothing measured here."""

import json
from functools import lru_cache
from pathlib import Path


@lru_cache
def known_cards() -> list[dict]:
    """`sft/cards.json`: figures of cards by a part of the name that they report, each with its source."""
    return json.loads((Path(__file__).parent / "cards.json").read_text(encoding="utf-8"))["cards"]


def find_card(device_name: str) -> dict | None:
    """The figures of a card; the longest matching name wins ("910B4" before "910B"). None when it is not listed."""
    found = [card for card in known_cards() if card["match"].lower() in device_name.lower()]
    return max(found, key=lambda card: len(card["match"]), default=None)


def flop_per_token(weights: int, recompute: bool) -> int:
    """Floating-point operations of LoRA training per token: 2 N forward and 2 N for the gradients of the activations.

    weights: N, those that a token is multiplied with, so without the table of input embeddings. A frozen base needs no
    gradients of weights, which would be another 2 N (Kaplan et al. 2020, "Scaling Laws", section 2.1: 6 N in all).
    recompute: the forward once more, 2 N.
    """
    return (6 if recompute else 4) * weights


def model_flops_utilisation(tokens: int, step_time_s: float, weights: int, device_names: list[str]) -> float | None:
    """Share of the cards' peak bf16 arithmetic that a step's products used (MFU); None where a card's peak is not known.

    tokens: of the global batch. device_names: one per rank. Recomputation is work that the model does not need and is
    not counted (Chowdhery et al. 2022, "PaLM", appendix B).
    """
    cards = [find_card(name) for name in device_names]
    if not all(cards) or step_time_s <= 0:
        return None
    return tokens * flop_per_token(weights, recompute=False) / step_time_s / sum(card["bf16_flops"] for card in cards)
