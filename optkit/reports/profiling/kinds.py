"""What an operation of torch, a GPU kernel or an ONNX Runtime node does, judged by its name."""

from __future__ import annotations

import re

from optkit.reports.profiling.profile_report import Kind

ORDER: tuple[tuple[Kind, str], ...] = (
    ("matmul", r"^(linear|wide)$"),  # optkit's own kernels, in kernels/cuda/*.cu
    ("attention", r"^attend$"),
    ("norm", r"^(arrange|line_up)$"),
    ("copies", r"^(dequantize|embed)$"),
    ("elementwise", r"^(choose|keep|agree|sum|finish|finish_coded|turn_prompt|columns|route|group|weighted)$"),
    (
        "other",  # views, and what allocates
        r"^aten::(view|slice|transpose|t|expand|unsqueeze|squeeze|narrow|as_strided|select|permute|detach|reshape|alias|unflatten|split\w*"
        r"|chunk|_unsafe_view|empty\w*|resize_|lift_fresh|item|to|_local_scalar_dense)$",
    ),
    ("compiled", r"^torch-compiled region|call compiledfxgraph|^compiledfunction"),
    (
        "copies",
        r"^mem(cpy|set)|catarray|direct_copy|_copy_kernel|^aten::(copy_|_to_copy|cat|clone|contiguous|stack|index_copy_|fill_|zero_)$",
    ),
    ("attention", r"attention|flash_fwd|flash_attn|fmha|attn|sdpa|flex_decoding|paged"),
    (
        "matmul",
        r"gemm|gemv|matmul|nvjet|cutlass|cublas|splitk|_mm\b|_mm_|::mm$|::bmm$|::addmm|baddbmm|::linear|_linear|int4pack|weight_only|w4a16"
        r"|marlin|embedding_bag|\bdot\b|::mv$|conv|qlinear|triton_tem|triton_mm|quantized_linear|int4|wmma|mma_",
    ),
    ("norm", r"norm|rsqrt|welford"),
    ("elementwise", r"^rotaryembedding$"),
    ("elementwise", r"elementwise|vectorized|unrolled|triton_(poi|red|per)|softmax|reduce_kernel|cpp_fused"),
    (
        "copies",
        r"copy|gather|scatter|index|slice|concat|transpose|reshape|unsqueeze|squeeze|expand|cast$|split|embedding|^aten::select",
    ),
    (
        "elementwise",
        r"^(aten::)?(add|sub|mul|div|neg|pow|exp|silu|sigmoid|gelu|relu|tanh|cos|sin|sqrt|where|mean|sum|max|min|amax|argmax|masked_fill_?"
        r"|le|lt|ge|gt|eq|ne|bitwise_\w+|logical_\w+|round|clamp|arange|cumsum|floor_divide|fill|erf|quickgelu|reduce\w+|skip\w+)_?$",
    ),
)
"""The first pattern that a name, in lower case, matches decides."""


def kind_of(name: str) -> Kind:
    """Return the kind of an operation."""
    lowered = name.lower()
    return next((kind for kind, pattern in ORDER if re.search(pattern, lowered)), "other")
