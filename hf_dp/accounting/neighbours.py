"""Which datasets epsilon compares, in the words of records and cards."""

# Both have n units, which is public: the sampling probability, the number of steps and delta may follow from it. In one
# of them one unit adds nothing to any sum. `dp_accounting`'s REPLACE_SPECIAL (Kairouz et al. 2021, arXiv:2103.00039,
# definition 1.1).
ZERO_OUT = "replace one by nothing (zero-out), n public"
# The same where examples of units are drawn each by itself. Whose each is decides which are drawn from, and how many:
# both datasets have the same places for examples, whose each is stays, and in those of one unit there is nothing.
ZERO_OUT_EXAMPLES = "replace all examples of one by nothing (zero-out), n and whose each example is public"
# One of them has a unit more. The sampling probability, the number of steps, delta and what sums are divided by are
# numbers of their own, and nothing that is released follows from n. `dp_accounting`'s ADD_OR_REMOVE_ONE.
ADD_OR_REMOVE = "add or remove one, n secret"
# What the first records said of zero-out: from their ledgers the same numbers follow, of that relation alone.
SAID_BEFORE = "add or remove one"
