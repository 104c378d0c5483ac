"""The polar factor of a batch of matrices, checked numerically. Knows tensors only; imports no other package.

`isometry` is the verb `polar`, `solving` solves lists of weights; `routes` has the ways to a polar factor, `schedules`
their step coefficients, `symmetric` the arithmetic of Gram matrices, `completion` the directions that a matrix lacks,
`devices` what surrounds the arithmetic.
Start reading at `isometry.polar`.
"""
