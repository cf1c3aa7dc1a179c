"""DP-FEST's choice of rows: the k most frequent ones, by a DP top-k (Ghazi et al. 2023, arXiv:2311.08357)."""

from __future__ import annotations

import math

import torch
from scipy import special
from torch import Tensor

from hf_dp.noise.source import NoiseSource


def gumbel_scale(noise_multiplier: float, k: int) -> float:
    """The scale of Gumbel noise with which a top-k is dominated by a Gaussian mechanism with that noise multiplier.

    The k largest of counts with Gumbel noise of scale 1 / lambda are k exponential mechanisms in a row (Durfee and
    Rogers 2019, arXiv:1905.04273). One example more raises each count by 0 or 1, so the privacy loss of
    each mechanism lies in an interval of length lambda. The worst such mechanism has two outcomes (Dong, Durfee and
    Rogers 2020, arXiv:1909.13830), and of these the one with losses +-lambda / 2 is the hardest to
    dominate: Phi^-1 of its two probabilities differs by mu = 2 Phi^-1(1 / (1 + exp(-lambda / 2))), and a trade-off
    function with one corner lies above that of mu-Gaussian differential privacy if the corner does. k of them are
    sqrt(k) mu-Gaussian, and a Gaussian mechanism with noise multiplier z is 1 / z-Gaussian: mu = 1 / (z sqrt(k)).

    Args:
        noise_multiplier: z, of the Gaussian mechanism that is charged.
        k: how many rows are chosen.

    Returns:
        1 / lambda, in examples.
    """
    x = 0.5 / (noise_multiplier * math.sqrt(k))
    # logit(Phi(x)), without the rounding of 1 - Phi(x).
    return 0.5 / float(special.log_ndtr(x) - special.log_ndtr(-x))


def noisy_top_k(counts: Tensor, k: int, scale: float, noise: NoiseSource, release: int) -> Tensor:
    """The k rows with the largest counts and Gumbel noise, ascending. The caller has charged it.

    Args:
        counts: (V,) how many examples touch each row.
        k: at most V.
        scale: of the noise.
        noise: where it comes from.
        release: which choice of the run this is.
    """
    drawn = noise.generator("top-k", release).gumbel(0.0, scale, len(counts))
    noisy = counts.double() + torch.from_numpy(drawn)
    return noisy.topk(k).indices.sort().values
