"""Three verbs, one answer: what follows from the words of `health`, `probe` and `advise`, and which of them stands.

`health` gives signs, `probe` measures, `advise` chooses by trying. Where they differ the later one stands, unless it
could not tell.

>>> conclusion(health="watch", probe="as fresh")
('probe', 'nothing is lost, whatever signs health shows')
>>> conclusion(health="act", probe="unknown")[0]
'health'
"""

from __future__ import annotations

STANDING = {
    "health": "signs only: rekindle.probe measures, and where the two differ the probe is right",
    "probe": "a measurement: it stands over the signs of health; rekindle.advise finds what to do by trying",
    "advise": "chosen by trying: it stands over health and probe",
    "rank": "an order by trying; whether the first has lost plasticity, rekindle.probe measures",
}
"""What the text of each verb says about the others."""

DECISIONS = {
    ("health", "healthy"): "no sign: train on; probe if it learns more slowly than before",
    ("health", "watch"): "a sign: probe to be sure",
    ("health", "act"): "strong signs: probe to be sure, then advise",
    ("health", "unknown"): "too little was measured: give batches",
    ("probe", "as fresh"): "nothing is lost, whatever signs health shows",
    ("probe", "better than fresh"): "nothing is lost, whatever signs health shows",
    ("probe", "lost"): "plasticity is lost, even where health shows no sign: advise",
    ("probe", "unknown"): "too short to say: health stands until there are more steps or seeds",
    ("advise", "apply"): "apply it: a repair where a reset also wins, else a better start",
    ("advise", "do nothing"): "train on: nothing that was tried learns better",
    ("advise", "do not"): "train on: all that was tried learns worse",
    ("advise", "cannot tell"): "the probe stands until there is more time or there are more seeds",
}
"""By verb and its word: the answer."""
_OPEN = {"unknown", "cannot tell"}


def conclusion(health: str | None = None, probe: str | None = None, advise: str | None = None) -> tuple[str, str]:
    """Which verb stands, and what its word means: of those that were asked the last one that could tell.

    Args:
        health: the verdict of a `Health`, such as "watch".
        probe: the verdict of a `ProbeResult`, such as "lost".
        advise: the answer of an `Advice`, such as "apply".

    >>> conclusion("healthy", "lost", "do nothing")
    ('advise', 'train on: nothing that was tried learns better')
    """
    said = [(verb, str(word)) for verb, word in (("health", health), ("probe", probe), ("advise", advise)) if word]
    if not said:
        raise ValueError("no verb was asked: give the word of health, of probe or of advise")
    verb, word = next((pair for pair in reversed(said) if pair[1] not in _OPEN), said[-1])
    return verb, DECISIONS[verb, word]
