"""Who consumes a neuron's output: the graph of a model, and the wiring that follows from it.

`graph` makes graphs and knows what operations do, `paths` follows neurons through them, `wiring` is what comes out;
`invariance` finds layers with a normalisation right behind them. Knows modules and graphs; may import `isolation` and
`blocks`. Start reading at `wiring.wire`.
"""
