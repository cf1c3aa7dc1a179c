"""Which datasets epsilon compares, in the words of records and cards."""

# Both have n units, which is public: the sampling probability, the number of steps and delta may follow from it. In one
# of them one unit adds nothing to any sum. `dp_accounting`'s REPLACE_SPECIAL (Kairouz et al. 2021, arXiv:2103.00039,
# definition 1.1).
ZERO_OUT = "replace one by nothing (zero-out), n public"
# What records said before. From their ledgers the same numbers follow, of the relation above.
ADD_OR_REMOVE = "add or remove one"

# "Had any single one ...", the end of the sentence.
_HAD_IT = {ZERO_OUT: "added nothing to the training", ADD_OR_REMOVE: "been absent from the training data (or present)"}


def had_it(adjacency: str) -> str:
    """What cards say of a neighbour: those of earlier records keep their words, so that they can be compared."""
    return _HAD_IT.get(adjacency, _HAD_IT[ZERO_OUT])


def is_known(adjacency: str) -> bool:
    """Whether the accountants here compute epsilon for it; under replace-one, say, the same events cost more."""
    return adjacency in _HAD_IT


def read_as(adjacency: str) -> str:
    """What is to be read where a record says that."""
    return f"{adjacency}, that is: {ZERO_OUT}" if adjacency == ADD_OR_REMOVE else adjacency
