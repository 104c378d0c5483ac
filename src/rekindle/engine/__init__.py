"""The polar factor of a batch of matrices, checked numerically.

Knows tensors only; imports no other package.

`isometry` is the verb `polar`, `operator` is how torch sees it, `solving` solves lists of weights; `arithmetic` is how
every solve begins and ends: with Gram matrices, checked; `devices` where and in which precision numbers are computed;
`routes` has the ways to a polar factor, `bulk` that of small matrices, `schedules` their step coefficients,
`symmetric` block solves, `completion` the directions that a matrix lacks, `tuning` which route pays on which `cpu`.
Start reading at `isometry.polar`.
"""
