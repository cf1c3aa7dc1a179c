"""One private step: the plan, the clipped sum, its noise and what the optimizer makes of it."""
