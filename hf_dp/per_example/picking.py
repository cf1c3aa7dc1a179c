"""Which operations pick rows, turn them round or write some, and where their arguments have the axis."""

from __future__ import annotations

from hf_dp.per_example.axes import Place

INDEXING = frozenset(("__getitem__", "index"))
# Of these each number of the result is one of the first argument's, wherever that is chosen by the others.
CHOOSING = INDEXING.union(
    ("index_select", "gather", "take_along_dim", "narrow", "narrow_copy", "slice", "roll", "flip"),
    ("split", "chunk", "vsplit", "hsplit", "dsplit"),
)
INDEXED_WRITES = frozenset(("__setitem__", "index_put", "index_put_"))
JOINING = frozenset(("cat", "concat", "concatenate", "vstack", "row_stack"))
VIEWING = frozenset(("view", "reshape", "unflatten", "view_as", "reshape_as"))
# How the first argument is called, where it is given by name.
FIRST = ("input", "self", "tensor", "tensors", "sequences")
# Where what picks along one axis has it.
PICKING: dict[str, Place] = {
    **dict.fromkeys(("cat", "concat", "concatenate"), (1, 0)),
    **dict.fromkeys(("split", "split_with_sizes", "tensor_split", "chunk", "unsafe_chunk", "unsafe_split"), (2, 0)),
    **dict.fromkeys(("narrow", "narrow_copy", "index_select", "gather", "unfold", "slice"), (1, 0)),
    "sort": (1, -1),
    "topk": (2, -1),
    "take_along_dim": (2, None),
    "hsplit": (9, 1),
    "dsplit": (9, 2),
    **dict.fromkeys(("vstack", "row_stack", "vsplit"), ()),
    **dict.fromkeys(("masked_select", "take", "msort", "unique", "unique_consecutive", "as_strided"), ()),
}
# The same of what turns rows round, which matters where these are the examples' alone.
TURNING: dict[str, Place] = {"roll": (2, None), "flip": (1, None), "flipud": (), "fliplr": (9, 1)}
# The same of what writes rows into others.
WRITING: dict[str, Place] = {
    **dict.fromkeys(("index_add", "index_copy", "index_fill", "index_reduce", "slice_scatter"), (1, 0)),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce", "select_scatter"), (1, 0)),
    **dict.fromkeys(("masked_scatter", "put"), ()),
}
MAY_PICK = {*INDEXING, *INDEXED_WRITES, *PICKING, *TURNING, "repeat_interleave"}
