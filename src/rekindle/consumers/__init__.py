"""Who consumes a neuron's output: the graph of a model, and the wiring that follows from it.

`graph` makes graphs and knows what operations do, `paths` follows neurons through them, `wiring` is what comes out.
Knows modules and graphs; imports no other package. Start reading at `wiring.wire`.
"""
