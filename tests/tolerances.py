"""How near two runs have to be, on the simulated Ascend and on real cards.

The simulated cards compute with torch's CPU kernels, so that only the order of sums differs. Real cards have other
kernels: their fp32 products may use HF32 (11 bits of fraction, 2^-12 = 2.4e-4 a rounding; CANN's default for
convolutions, off for matmul), their exp and rsqrt differ in the last digits, and HCCL adds in an order of its own.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """Largest relative difference of a loss at one step; adapters may differ by as much absolutely."""

    simulated: float
    hardware: float
    reason: str

    def here(self, npu_environment: dict) -> float:
        """The one that counts, by the fixture `npu_environment`, which is empty where real cards are."""
        return self.simulated if npu_environment else self.hardware


FP32_AGAINST_CPU = Tolerance(
    1e-5, 1e-3, "another device's exp, rsqrt and sums; Adam's first steps amplify signs of tiny gradients"
)
FP32_BETWEEN_CARDS = Tolerance(1e-5, 1e-4, "the same kernels; only sums over ranks come in another order")
BF16_BETWEEN_CARDS = Tolerance(5e-3, 2e-2, "2^-8 = 0.4 % a rounding of activations; a loss is a mean over many of them")
FP32_RESUMED = Tolerance(1e-5, 1e-4, "the same steps on the same cards; kernels that are not deterministic")
