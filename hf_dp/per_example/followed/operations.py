"""Which operations work on each row of their first argument by itself."""

from __future__ import annotations

from torch import Tensor

from hf_dp.per_example.followed.picking import CATS, Operation
from hf_dp.per_example.watched import tensors_in

# Each row of what they give follows from that row of their first argument, and of others with as many.
_ELEMENTWISE = frozenset(
    (
        *("add", "sub", "mul", "div", "true_divide", "floor_divide", "neg", "pow", "rsqrt", "sqrt", "exp", "log"),
        *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__floordiv__"),
        *("__neg__", "__pow__", "__iadd__", "__imul__", "__isub__", "add_", "mul_", "sub_", "div_"),
        *("silu", "gelu", "relu", "sigmoid", "tanh", "softplus", "leaky_relu", "elu", "hardtanh", "relu6", "mish"),
        *("logsigmoid", "hardswish", "hardsigmoid", "selu", "celu", "square", "abs", "relu_", "softsign", "relu6_"),
        *("sin", "cos", "erf", "exp2", "expm1", "log1p", "log2", "reciprocal", "sigmoid_", "tanh_"),
        *("__and__", "__or__", "__invert__", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or"),
        *("eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
        *("clamp", "clamp_", "clamp_min", "clamp_max", "minimum", "maximum", "masked_fill", "masked_fill_"),
        *("to", "type", "float", "half", "bfloat16", "double", "int", "long"),
        *("type_as", "contiguous", "clone", "detach", "dropout"),
    )
)
# Row i of what they give follows from row i of what they are given, and of the states.
CELLS = ("gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell")
_OTHERS = (*CELLS, "expand", "expand_as", "linear", "embedding", "_grouped_mm", "grouped_mm_fallback")
_NORMS = ("rms_norm", "layer_norm")
# The same, if it is another axis than the first that they are asked to work along, as the argument of this number.
_ALONG_OTHERS = {
    "chunk": 2,
    "split": 2,
    "unsqueeze": 1,
    "squeeze": 1,
    "glu": 1,
    "mean": 1,
    "sum": 1,
    "cumsum": 1,
    "unbind": 1,
    "softmax": 1,
    "log_softmax": 1,
    "flatten": 1,
}
# What leads in their first argument does so in what they give first, whatever follows it.
_LEADING = frozenset(
    (
        *("linear", "embedding", "softmax", "log_softmax", "normalize", *_NORMS, "batch_norm", "group_norm", "pad"),
        *("lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward", "scaled_dot_product_attention"),
    )
)
_CONVOLUTIONS, _REDUCTIONS = ("conv1d", "conv2d", "conv3d"), ("sum", "mean")
_PRODUCTS = ("matmul", "__matmul__", "mm")
# Each row with a matrix of its own.
BATCHED = (*_PRODUCTS, "bmm")
_ATTENTION, _TRANSPOSES = "scaled_dot_product_attention", ("transpose", "swapaxes", "swapdims")


def is_elementwise(name: str) -> bool:
    """Whether an operation works on each number by itself, and on those of others that lie beside it."""
    return name in _ELEMENTWISE or name == "where"


def keeps_axes(name: str) -> bool:
    """Whether what an operation gives has as many axes as its first argument, and as others beside it."""
    return name not in _ALONG_OTHERS and name != "embedding"


def leads_alike(op: Operation, given: Tensor, axis: int, made: Tensor) -> bool:
    """Whether the axes of what an operation was given, up to one, are the first ones of what it made, whatever sizes
    there are."""
    name, args = op.name, op.args
    if is_elementwise(name):
        return given.dim() == made.dim()
    if name in CATS:
        along = op.axis_at(1)
        return given.dim() == made.dim() and isinstance(along, int) and along % made.dim() != axis
    if name in BATCHED and len(args) > 1 and given.dim() == made.dim() > 2:  # several products, in order
        return axis < given.dim() - 2
    if given is not op.source or made is not next(iter(tensors_in(op.output)), None):
        return False
    if name in _PRODUCTS:
        return given.dim() > 1 and len(args) > 1 and isinstance(args[1], Tensor) and args[1].dim() == 2
    if name in _CONVOLUTIONS:
        return not axis and len(args) > 1 and isinstance(args[1], Tensor) and args[1].dim() == given.dim()
    if name in _REDUCTIONS:
        axes = op.kwargs.get("dim", args[1] if len(args) > 1 else None)
        several = axes if isinstance(axes, (tuple, list)) else [axes]
        return bool(several) and all(isinstance(one, int) and one % given.dim() > axis for one in several)
    return name in _LEADING


def works_by_rows(op: Operation) -> bool:
    """Whether row i of what an operation gives follows from row i of its first argument alone."""
    name, args = op.name, op.args
    source = args[0]
    if name == "where":  # of one argument it gives places
        return len(args) + len(op.kwargs) == 3
    if name in BATCHED:  # with one matrix for all rows, or one for each
        axes = args[1].dim() if len(args) > 1 and isinstance(args[1], Tensor) else 0
        return source.dim() > 1 and (axes == 2 or axes == source.dim())
    if name == _ATTENTION:
        return source.dim() > 2 and all(isinstance(a, Tensor) and a.dim() == source.dim() for a in args[1:3])
    if name in _TRANSPOSES:
        return len(args) == 3 and all(axis % source.dim() > 0 for axis in args[1:])
    if name == "permute":
        order = args[1] if len(args) == 2 else args[1:]
        return bool(order) and order[0] % source.dim() == 0
    if name in _NORMS:  # over as many of the last axes as they are given sizes
        return len(args) > 1 and len(args[1]) < source.dim()
    if name not in _ALONG_OTHERS:
        return name in _ELEMENTWISE or (name in _OTHERS and (source.dim() > 1 or not name.endswith("linear")))
    dimensions, axis = source.dim() + (name == "unsqueeze"), op.axis_at(_ALONG_OTHERS[name])
    return isinstance(axis, int) and axis % dimensions > 0
