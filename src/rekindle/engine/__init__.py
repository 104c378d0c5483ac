"""The polar factor of a batch of matrices, checked numerically.

Knows tensors only; may import `isolation`, for what surrounds its arithmetic.

`isometry` is the verb `polar`, `solving` solves lists of weights; `routes` has the ways to a polar factor, `schedules`
their step coefficients, `symmetric` the arithmetic of Gram matrices, `completion` the directions that a matrix lacks,
`tuning` which route pays on which `cpu`. Start reading at `isometry.polar`.
"""
