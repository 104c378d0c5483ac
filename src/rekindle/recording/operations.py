"""What operators do to the elements of their arguments: move, multiply as matrices, reduce, choose.

An operator that is not listed here is taken to work element by element where the shapes allow that.
"""

from __future__ import annotations

# The result holds the elements of the first argument, in another order or only some of them.
MOVES = frozenset(
    {
        *("permute", "transpose", "t", "slice", "select", "split", "split_with_sizes", "unbind", "chunk", "squeeze"),
        *("unsqueeze", "expand", "flip", "index_select", "narrow", "unsafe_chunk", "unsafe_split", "repeat", "roll"),
        *("unsafe_split_with_sizes", "unfold", "diagonal", "movedim", "swapaxes", "swapdims", "mT", "rot90"),
        *("repeat_interleave", "hsplit", "vsplit", "tensor_split", "constant_pad_nd", "tril", "triu", "pixel_shuffle"),
        *("pixel_unshuffle", "channel_shuffle", "native_channel_shuffle", "numpy_T", "gather", "index"),
    }
)
RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten"})
SAME = frozenset({"clone", "detach", "alias", "_to_copy", "contiguous", "lift_fresh", "to", "positive"})
JOINS = frozenset({"cat", "stack", "concat"})
# Where the two factors of a product of matrices stand among the arguments.
PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "matmul", "linear", "convolution", "_convolution"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation"), (1, 2)),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "mkldnn_linear", "_mkldnn_linear"), (0, 1)),
}
WEIGHT_NORMS = frozenset({"_weight_norm_interface", "_weight_norm"})
CONVOLUTIONS = frozenset({"convolution", "_convolution"})
ATTENTION = frozenset(
    {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_attention_math",
        "scaled_dot_product_attention",
        "flex_attention",
    }
)
SUMS = frozenset({"sum", "mean", "nansum", "logsumexp", "var", "std", "var_mean", "norm", "linalg_vector_norm", "prod"})
EXTREMES = frozenset({"max", "amax", "min", "amin", "aminmax", "median"})
CHOICES = frozenset({"topk", "argmax", "argmin", "sort", "argsort", "max", "kthvalue", "multinomial"})
SOFTMAXES = frozenset({"_softmax", "_safe_softmax", "softmax"})
SCORES = frozenset({"_softmax", "_safe_softmax", "softmax", "_log_softmax", "topk", "sort"})
REDUCES = SUMS | EXTREMES | CHOICES | SCORES
# Linear in what is recorded: two parts of one output that meet here may be a rotation.
LINEAR = MOVES | RESHAPES | SAME | JOINS | {"add", "sub", "rsub", "mul", "div", "neg", "native_dropout", "sum", "mean"}
LINEAR |= {"native_layer_norm", "_fused_rms_norm", "native_group_norm", "native_batch_norm", "write", "copy"}
MULTIPLIES = frozenset({"mul", "div", "addcmul", "addcdiv"})
ADDS = frozenset({"add", "sub", "rsub", "lerp"})
TABLES = frozenset({"embedding", "_embedding_bag", "_embedding_bag_forward_only", "embedding_renorm"})
# Layers of one operator, by how their weights enter: what they do with them is not seen.
OPAQUE = {
    **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell"), "opaque"),
    **dict.fromkeys(("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "gru_cell", "_lstm_mps", "miopen_rnn"), "opaque"),
    "_trilinear": "bilinear",
    **dict.fromkeys(("_cdist_forward", "_euclidean_dist"), "distance"),
}
# Read their arguments' shapes only.
SHAPES = frozenset(
    {
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones"),
        *("new_empty", "new_full", "sym_size", "randint_like", "new_empty_strided", "bernoulli", "is_same_size"),
    }
)
# What keeps the neurons of a layer separate (`neurons`): norms by the axis along which they have a number per neuron.
BATCH_NORMS = frozenset(
    {
        *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm"),
        *("_batch_norm_with_update", "_batch_norm_no_update", "batch_norm", "miopen_batch_norm"),
    }
)
NORMS = {
    **dict.fromkeys((*BATCH_NORMS, "native_group_norm"), "channel"),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm"), "last"),
}
FUNCTIONS = frozenset(
    {
        *("relu", "relu6", "gelu", "silu", "mish", "tanh", "sigmoid", "leaky_relu", "elu", "celu", "selu", "softplus"),
        *("hardtanh", "hardswish", "hardsigmoid", "log_sigmoid_forward", "softshrink", "hardshrink", "threshold"),
        *("abs", "pow", "square", "sqrt", "rsqrt", "exp", "expm1", "log", "log1p", "erf", "sin", "cos", "reciprocal"),
        *("clamp", "clamp_min", "clamp_max", "sign", "sgn", "rrelu_with_noise", "logical_not", "isnan", "isfinite"),
    }
)
TRANSPARENT = frozenset({"native_dropout", "dropout", "neg", "view_as_real", "bernoulli"})
POOLS = {
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d"), 2),
    **dict.fromkeys(("max_pool3d_with_indices", "avg_pool3d", "_adaptive_avg_pool3d", "adaptive_max_pool3d"), 3),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "max_pool2d"), 2),
    **dict.fromkeys(("upsample_nearest1d", "upsample_linear1d", "avg_pool1d", "adaptive_avg_pool1d"), 1),
    **dict.fromkeys(("upsample_nearest3d", "upsample_trilinear3d", "mkldnn_max_pool2d"), 3),
    "reflection_pad2d": 2,
    "replication_pad2d": 2,
}
ELEMENTWISE = frozenset(
    {
        *("add", "sub", "rsub", "mul", "div", "maximum", "minimum", "where", "addcmul", "addcdiv", "lerp", "atan2"),
        *("gt", "lt", "ge", "le", "eq", "ne", "_prelu_kernel", "masked_fill", "logical_and", "logical_or"),
    }
)
