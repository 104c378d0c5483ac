"""Who consumes a neuron's output: the graph of a model, and the wiring that follows from it.

`graph` makes graphs and knows what operations do, `paths` follows neurons through them, `wiring` is what comes out;
`invariance` finds layers with a normalisation right behind them.
`source` reads what classes do with their submodules' outputs: `statements` walks the syntax tree, `expressions` says
what an expression holds, `containers` opens tuples, dicts and what a call returned, `values` has the layers and what is
recorded. Knows modules and graphs; may import `isolation`. Start reading at `wiring.wire`.
"""
