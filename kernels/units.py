"""Between natural logarithms, in which logits and statistics are, and base 2, in which exponentials are computed."""

import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
