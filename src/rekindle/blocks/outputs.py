"""Which layers are outputs of a model, as its own word, its source (`rekindle.blocks.source`) and names say.

A head is a layer whose output leaves the model and that no later matrix reads; a model may have several (an actor and
a critic, a policy head and a value head, class logits and boxes). Three kinds of evidence, all of which count:

1. what the model itself says: `get_output_embeddings()` of the model and of every model inside it;
2. its source: from the root down, the submodules whose output no other submodule with matrices reads. A layer that is
   added to what it was computed from writes into a residual stream and is no head, so an encoder without a head has
   none: its last MLP output is an embedding that others read.
3. names that mean a head (`lm_head`, `cls_logits`; `value_head`, `mu` unless the source shows a later reader).

Where there is none, the last matrix in registration order is taken, unless its role says that it is the middle of a
block. `heads=` overrules all of it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rekindle.blocks.entries import Found
from rekindle.blocks.fused import is_torchs, output_layers
from rekindle.blocks.layers import (
    as_layer,
    fits,
    has_matrices,
    input_width,
    layers_in,
    narrows,
    output_width,
    with_matrices,
)
from rekindle.blocks.names import unwrapped, wrapped
from rekindle.blocks.source import uses_of
from rekindle.blocks.values import Uses, at, base, by_path, key_of
from rekindle.spelling import argument

_DIRECT = {"head", "heads", "lm_head", "classifier", "fc", "score", "qa_outputs", "cls", "logits", "output_layer"}
_DIRECT |= {"embed_out", "decoder_head", "action_net", "value_net", "fc_out", "classification_head", "output"}
# Names that mean a head at any depth, even where its output is read again (boxes are refined layer by layer).
ANYWHERE = re.compile(
    r"cls_logits|cls_score|bbox_(pred|embed|predictor)|class_(embed|labels_classifier|predictor)"
    r"|lm_heads?|mask_fcn_logits|kps_score_lowres|seq_relationship|\w+_(score|bbox)_head"
)
# Names that mean one unless the source shows a later reader (stable-baselines3 has a `value_net` before `value_net`).
USUALLY = re.compile(
    r"(v|q|value|policy|action|actor|critic|advantage|classification|reward|mu|sigma|log_?std)_heads?"
    r"|(ctc|aux|mlm|nsp|vocab|codec|speaker)_heads?|head_dist|auxiliary_head|aux_classifier|qa_outputs|embed_out"
    r"|(text|visual|image|audio|speech|vision)_projection|(action|value|policy)_net|log_?std|(fc_)?(mu|mean|log_?std)(_(layer|linear))?|mean_linear"
)
_OF_A_BODY = re.compile(r"lm_heads?|(text|visual|image|audio|speech|vision)_projection")
# Networks whose outputs are outputs of the whole, even if others read them: agents, generators, discriminators.
_AGENT = re.compile(
    r"(?<!extr)actor|critic|policy|value|q_?net|^q\d?$|^qf\d?$|^pi$|^vf\d?$|target|advantage|reward|agent"
    r"|generator|discriminator|^(net)?_?[GD](_\w)?$",
    re.I,
)
# Keys of outputs that are not predictions.
_FEATURES = re.compile(r"hidden|state|feature|embed|attention|latent|memory|cache|past|quantized|codes|maps")
_TASK = re.compile(r"For[A-Z]|Head|With[A-Z]\w*Head|LMHead|DoubleHeads")


def find_heads(model: nn.Module) -> dict[int, str]:
    """`id(layer)` of every head and its evidence ("told", "named" or "traced"), empty where there is none.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3), nn.Softmax(-1))
    >>> find_heads(net) == {id(net[2]): "traced"}
    True
    """
    core = root_of(model)
    read: set[int] = set()
    if as_layer("", core) is not None:
        return {}
    told = {id(layer): "told" for layer in told_heads(model)}
    ends = _ends(core, set(), read, _Leaving(root=True))
    if is_backbone(core):
        # A body ends in features, which are as wide as what they come from (a pooler) or wider (a last convolution);
        # what narrows is an output: audio of a codec, an embedding to compare. One that holds whole language models
        # (Bark) has their heads.
        found = {id(layer): "traced" for layer in ends if narrows(layer)}
        return found | {id(layer): "named" for layer in _named(core, read, only=_OF_A_BODY)} | told
    found = {id(layer): "traced" for layer in [*ends, *_returned(core)]}
    return found | {id(layer): "named" for layer in _named(core, read)} | told


def _returned(core: nn.Module) -> list[nn.Module]:
    """Two or more layers of one shape whose outputs the root returns as they are: mean and variance of a distribution.

    They are heads even where a later matrix reads a sample of them (the decoder of a VAE). A single layer that is
    returned and read may be a hidden layer that is shown (`conv_head` of timm's EfficientNet), and so may a
    list of layers, unless they narrow (scores after each stage, which the next stage reads too).
    """
    uses = None if is_torchs(core) else uses_of(core)  # a Sequential returns its last layer, which is known
    alike: dict[tuple[int, ...], list[nn.Module]] = {}
    for path in sorted(uses.returns - uses.added) if uses is not None else ():
        for layer in at(core, path):
            if not isinstance(layer, nn.Linear | nn.modules.conv._ConvNd) or is_lazy(layer.weight):
                continue
            if "*" not in path or narrows(layer):
                alike.setdefault(tuple(layer.weight.shape), []).append(layer)
    return [layer for layers in alike.values() if len(layers) > 1 for layer in layers]


def is_backbone(model: nn.Module) -> bool:
    """Whether a transformers model says that it is the body without a head.

    Such a model is its own `base_model`; so is one whose class has no body of the usual name (`ParakeetForCTC`), which
    is recognized by its class name.

    >>> is_backbone(nn.Linear(2, 2))
    False
    """
    return getattr(model, "base_model", None) is model and _is_body(model)


def _is_body(model: nn.Module) -> bool:
    prefix = getattr(model, "base_model_prefix", None)
    return prefix is not None and _TASK.search(type(model).__name__) is None


def root_of(model: nn.Module) -> nn.Module:
    """Through wrappers, and through modules that only hold one other.

    >>> net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    >>> root_of(nn.DataParallel(nn.Sequential(net))) is net
    True
    """
    while True:
        inner = [c for c in model.children() if any(True for _ in c.parameters())]
        if wrapped(model) is not None:
            model = unwrapped(model)
        elif getattr(model, "base_model_prefix", None) is not None:  # a transformers model says itself what it is
            return model
        elif isinstance(inner[0] if len(inner) == 1 else None, nn.ModuleList | nn.ModuleDict) and uses_of(model):
            return model  # a list is called by the class around it
        elif len(inner) == 1 and not any(True for _ in model.parameters(recurse=False)):
            model = inner[0]
        else:
            return model


def told_heads(model: nn.Module) -> list[nn.Module]:
    """`get_output_embeddings()` of every model inside, and the head of a class that only names it."""
    found = []
    for module in model.modules():
        told = getattr(module, "get_output_embeddings", None)
        if callable(told):
            try:
                layer = told()
            except (NotImplementedError, AttributeError):
                continue
            if isinstance(layer, nn.Module) and not isinstance(layer, nn.Embedding):  # FSMT names its input
                found.append(layer)
    return found


def _named(model: nn.Module, read: set[int], only: re.Pattern[str] | None = None) -> list[nn.Module]:
    """Layers whose name says head; `read` are those that the source shows to be read by others."""
    found = []
    for name, module in model.named_modules():
        above, _, leaf = name.rpartition(".")
        if only is not None and not only.fullmatch(leaf):
            continue
        always = ANYWHERE.fullmatch(leaf) is not None
        if not (always or USUALLY.fullmatch(leaf) or (not above and leaf in _DIRECT)):
            continue
        if leaf in ("q_head", "v_head") and "k_head" in model.get_submodule(above)._modules:
            continue  # Funnel's query, key and value are called so
        if above and type(model.get_submodule(above)).__name__ == "MlpExtractor":
            continue  # stable-baselines3's hidden layers, read by its own action_net and value_net
        parts = list(module.children()) if isinstance(module, nn.ModuleList | nn.ModuleDict) else [module]
        layers = [layer for part in parts for layer in list(layers_in(part))[-1:]]
        found += [layer for layer in layers if always or id(layer) not in read]
    return found


@dataclass(frozen=True)
class _Leaving:
    """How a module's outputs go on: `taken` are the keys that a later matrix reads.

    `root`: it is the model itself; `separate`: the arguments from which the others were not computed.
    """

    taken: frozenset[str] = frozenset()
    root: bool = False
    separate: frozenset[str] = frozenset()


_PLAINLY = _Leaving()


def _ends(module: nn.Module, seen: set[int], read: set[int], way: _Leaving = _PLAINLY) -> list[nn.Module]:
    """The layers inside whose output leaves the module and is read by no other matrix; those that are go to `read`.

    In the model itself a layer that is added to the input as it came predicts a difference (the noise of an image, the
    next state): that is an output. Deeper down it writes into a residual stream, unless the input was made beside it.
    """
    if id(module) in seen:
        return []
    seen.add(id(module))
    if as_layer("", module) is not None or isinstance(module, nn.Bilinear):
        return [] if way.taken else [module]
    if isinstance(module, torch.jit.ScriptModule):
        return []
    inner = module._modules.get("base_layer")
    if inner is not None:
        return _ends(inner, seen, read, way)
    if isinstance(module, nn.Sequential):
        solid = with_matrices(module.children())
        _mark(solid[:-1], read)
        return _ends(solid[-1], seen, read, way) if solid else []
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [] if way.taken else _apart(dict(module.named_children()), seen, read)
    uses = uses_of(module)
    if _has_no_forward(module) and (uses is None or not uses.called):
        return [] if way.taken else _apart(dict(module.named_children()), seen, read)
    if uses is None:
        return []
    taken = _labels(uses, way.taken)
    if taken is None:  # which of the outputs is read is not known: all of them
        return []
    found: list[nn.Module] = []
    chains = {path: at(module, path) for path in uses.called}
    solids = {path for path, modules in chains.items() if any(map(has_matrices, modules))}
    drafts = _drafts(module, uses, way.taken)
    consumed = taken | {a for a, b in uses.feeds if _is_read(a, b, solids)}
    consumed |= uses.added - (uses.corrects if way.root else _joining(uses, way.separate))
    consumed -= {a for a, b in uses.drafts if b in drafts}
    taken_at, drafts_at, leaving = by_path(consumed), by_path(drafts), by_path(uses.leaves | uses.outside)
    for path in sorted(solids):
        chain, labels = chains[path], taken_at.get(path, set())
        keys = frozenset(map(key_of, labels))
        if labels:
            _mark(chain, read)
        for draft in drafts_at.get(path, ()):
            found += drafts[draft] if labels & {draft, path} else []
        if path in labels or (uses.leaves and path not in leaving):
            continue
        again = frozenset(key_of(a) for a, b in uses.feeds if b == path == base(a))
        if path not in uses.leaves:  # what is used here and does not leave
            used = uses.added | {a for a, _ in uses.feeds}
            keys |= {key_of(label) for label in used - uses.leaves if base(label) == path} - {""}
        for i, child in enumerate(chain):
            last = i == len(chain) - 1
            own = keys if last else keys | (again - {""})
            separate = frozenset(name for called, name in uses.separate if called == path)
            ends = _ends(child, seen, read, _Leaving(own, False, separate))
            if "" in again and not last:  # the next element reads it, if it fits
                ends = [layer for layer in ends if not fits(layer, chain[i + 1])]
            found += ends
    called = {path.split(".")[0] for path in uses.called}
    apart = {n: c for n, c in module.named_children() if n not in called and _AGENT.search(n)}
    read -= {id(layer) for layer in found}
    if way.taken and _is_body(module):  # beside the features that are read: a pooler is as wide as they are
        found = [layer for layer in found if narrows(layer)]
    return found + _apart(apart, seen, read)


def _is_read(label: str, reader: str, solids: set[str]) -> bool:
    """Whether this reader of a layer is another matrix, and not the layer itself or a part of it."""
    path = base(label)
    return (reader in solids or reader.startswith("<")) and path != reader and not _inside(path, reader)


def _joining(uses: Uses, separate: frozenset[str]) -> set[str]:
    """What is added to an argument of the class that was made beside it: two branches, no residual stream."""
    apart = {
        uses.arguments[int(n)] if n.isdigit() else n
        for n in separate
        if not n.isdigit() or int(n) < len(uses.arguments)
    }
    related = {path for path, argument in uses.joins if argument not in apart}
    return {path for path, _ in uses.joins} - related


def _labels(uses: Uses, keys: frozenset[str]) -> set[str] | None:
    """What the outputs of these keys are computed from, None where a key is not known."""
    found: set[str] = set()
    for key in keys:
        rest = uses.outputs.get("**")
        if key in uses.outputs:
            found |= uses.outputs[key]
        elif rest is not None:
            found |= {f"{path}#{key}" for path in rest}
        elif key == "0" and uses.outputs:  # the first field of a dataclass
            found |= next(iter(uses.outputs.values()))
        elif key.isdigit() and not keys.isdisjoint(uses.outputs):  # the same as a name: `x.boxes if named else x[2]`
            continue
        else:
            return None
    return found


def _drafts(module: nn.Module, uses: Uses, taken: frozenset[str]) -> dict[str, list[nn.Module]]:
    """Outputs of their own key that are read again: a pitch that is embedded, a spectrogram that is corrected.

    A conservative guess: what narrows and is returned by itself is a prediction, unless its key says features.
    """
    found = {}
    for key, path in uses.shown.items() if len(uses.outputs) > 1 else ():
        layers = [layer for child in at(module, path) for layer in output_layers(child, key_of(path))]
        if "*" in path or not layers or key in taken or _FEATURES.search(key):
            continue
        if "logits" in key or all(map(narrows, layers)):
            found[path] = layers
    return found


def _has_no_forward(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward


def _mark(modules: list[nn.Module], read: set[int]) -> None:
    read |= {id(inner) for module in modules for inner in module.modules()}


def _apart(children: dict[str, nn.Module], seen: set[int], read: set[int]) -> list[nn.Module]:
    """Networks that are not called together (an actor and its critics): each has its own output.

    What another one could read by its size is no head: an encoder beside a decoder.
    """
    found = []
    widths = {name: input_width(child) for name, child in children.items()}
    for name, child in children.items():
        if as_layer("", child) is not None:
            continue
        for layer in _ends(child, seen, read):
            width = output_width(layer)
            if _AGENT.search(name) or not any(w == width for n, w in widths.items() if n != name):
                found.append(layer)
    return found


def _inside(a: str, b: str) -> bool:
    """Whether one path is part of the other: a module and its own child."""
    return a.startswith(f"{b}.") or b.startswith(f"{a}.")


def named_heads(found: list[Found], heads: Iterable[str] | str) -> set[str]:
    """The names of the weights that these globs (of parameter or module names) mark as heads; no match is an error."""
    globs = [heads] if isinstance(heads, str) else list(heads)
    for glob in globs:
        if not any(_matches(f, glob) for f in found if f.blocks):
            names = ", ".join(f.name for f in found if f.blocks)
            raise ValueError(f"{argument('heads', glob)} names no weight with matrices; there are: {names}")
    return {f.name for f in found if any(_matches(f, glob) for glob in globs)}


def mark_heads(found: list[Found], heads: set[str], reason: str = "output head") -> list[Found]:
    """The same list with these weights marked as heads; a tied embedding keeps its role."""
    marked = []
    for f in found:
        if f.name in heads and f.blocks:
            does = f.role if f.role == "embedding" else "head"
            blocks = f.blocks if does == "embedding" else tuple(replace(b, role="head") for b in f.blocks)
            why = "embedding, tied to the output head" if does == "embedding" else reason
            f = replace(f, role=does, blocks=blocks, marks={"head": why, **f.marks})
        marked.append(f)
    return marked


def _matches(found: Found, glob: str) -> bool:
    names = (found.name, found.module, found.key, *found.also)
    return any(fnmatch.fnmatchcase(name, glob) for name in names)
