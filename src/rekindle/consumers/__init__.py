"""Who consumes a neuron's output: the graph of a model, and the wiring that follows from it.

Knows modules and graphs; imports no other package. Start reading at `wiring.wiring`.
"""
