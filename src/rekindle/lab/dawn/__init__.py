"""DAWN, a language model whose neurons are mixtures of a shared basis: `network`, its `losses`, and `analysis`."""
