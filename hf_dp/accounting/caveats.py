"""What the numbers of a run do not cover, in the words of its report and card."""

from __future__ import annotations

HYPER_PARAMETER_SEARCH = (
    "Hyper-parameters chosen by comparing runs on the private data are not covered: each run leaks."
)
MODEL_SELECTION = "Early stopping and choosing a checkpoint by a metric on private data are not covered."
LOGGED_METRICS = (
    "The logged training loss, clipping statistics and all else that is logged of a batch without noise are exact "
    "functions of the private data and are not covered; withhold_non_private_logs keeps them out."
)
TOKENIZER = "A tokenizer, vocabulary or preprocessing fitted to the private text is not covered."
FLOATING_POINT = (
    "Noise is drawn in floating point and is not hardened against attacks on its rounding (Mironov 2012, "
    "doi:10.1145/2382196.2382264)."
)
MANY_ALIKE = (
    "Where a model computes in 16 bits and examples are padded unlike, many that are alike move together by rounding, "
    "by more than the noise covers."
)
SUMS_ON_A_GRID = (
    "Noise and the sums that it is added to are whole numbers of a grid, so that no digit of what is released tells "
    "more than Gaussian noise does; that rounding makes sums of neighbours differ by no more than 1/256 of the "
    "clipping norm besides is tested in float32 and not proven, of a model that computes in 16 bits more was seen, and "
    "rows that are chosen otherwise are so in floating point."
)
BEFORE_THE_GRID = f"Of trainings before, unless they say otherwise: {FLOATING_POINT}"
TOGETHER = (
    "Epsilon is of several trainings together, for whoever has at most one unit in the data of each, this one and:"
)
OWNERSHIP = (
    "Whose each example is, and so how many each has, is taken to be public, and is not covered: what stands in the "
    "examples is."
)
REPRODUCIBLE = "A seed was given: whoever knows it can subtract the noise."
NO_NOISE = "No finite epsilon holds: something was released without noise."
STANDARD_CAVEATS: tuple[str, ...] = (
    HYPER_PARAMETER_SEARCH, MODEL_SELECTION, LOGGED_METRICS, TOKENIZER, FLOATING_POINT, MANY_ALIKE
)  # fmt: skip


def standard_caveats(
    *,
    withholds_logs: bool,
    shows_whose: bool = False,
    noise: str = "gaussian",
    goes_on: bool = False,
    equal_widths: bool = False,
) -> tuple[str, ...]:
    """What no run covers; exact logs are no caveat of a run that withholds them, whose each example is is one where it
    decides which are drawn from, and what is left of floating point depends on the noise and on widths, also of
    trainings before."""
    own = (OWNERSHIP,) if shows_whose else ()
    met = {LOGGED_METRICS: withholds_logs, MANY_ALIKE: equal_widths and not goes_on}
    kept = tuple(caveat for caveat in STANDARD_CAVEATS if not met.get(caveat, False))
    if noise == "grid":
        on_grid = (SUMS_ON_A_GRID, *([BEFORE_THE_GRID] if goes_on else []))
        kept = tuple(caveat for caveat in kept if caveat != FLOATING_POINT) + on_grid
    return own + kept
