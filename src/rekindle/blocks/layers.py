"""Which modules are layers: what they make and read, how wide they are, and which hold matrices at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

PLAIN_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


TRANSPOSED_CONVS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, *PLAIN_CONVS, *TRANSPOSED_CONVS)


@dataclass(frozen=True)
class Layer:
    """A layer as producer or reader of neurons: its module, and which axes of its weight are outputs and inputs."""

    name: str
    module: nn.Module = field(repr=False, compare=False)
    out_axis: int
    in_axis: int

    @property
    def weight(self) -> nn.Parameter:
        """The weight that holds a row for each neuron made and a column for each one read."""
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias, where there is one."""
        bias = getattr(self.module, "bias", None)
        return bias if isinstance(bias, nn.Parameter) else None

    @property
    def out_size(self) -> int:
        """How many neurons the layer makes."""
        return self.weight.shape[self.out_axis]

    @property
    def in_size(self) -> int:
        """How many values the layer reads."""
        return self.weight.shape[self.in_axis]


def as_layer(name: str, module: nn.Module) -> Layer | None:
    """The module as a :class:`Layer`, or None if its class is none whose rows and columns are known.

    >>> as_layer("fc", nn.Linear(3, 5)).out_size
    5
    >>> as_layer("norm", nn.LayerNorm(3)) is None
    True
    """
    if isinstance(module, (nn.Linear, *PLAIN_CONVS)):
        return Layer(name, module, 0, 1)
    if isinstance(module, TRANSPOSED_CONVS) or is_transposed_linear(module):
        return Layer(name, module, 1, 0)
    return None


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether this is transformers' `Conv1D` (of GPT-2), a Linear whose weight is stored as (in, out)."""
    kinds = type(module).__mro__
    return any(kind.__name__ == "Conv1D" and kind.__module__.partition(".")[0] == "transformers" for kind in kinds)


def has_matrices(module: nn.Module) -> bool:
    """Whether the module holds weights that transform, rather than norms, activations or tables."""
    return any(
        _is_matrix(parameter)
        for inner in module.modules()
        if not isinstance(inner, nn.Embedding | nn.EmbeddingBag | nn.LayerNorm)
        for parameter in inner._parameters.values()
        if parameter is not None
    )


def with_matrices(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of the modules that hold such weights."""
    return [module for module in modules if has_matrices(module)]


def _is_matrix(parameter: nn.Parameter) -> bool:
    """Whether it has two axes or more; a lazy layer has no shape yet, and is taken to have."""
    return is_lazy(parameter) or parameter.dim() > 1


def layers_in(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside that hold a matrix themselves."""
    for inner in module.modules():
        if any(p is not None and _is_matrix(p) for p in inner._parameters.values()):
            yield inner


def input_width(module: nn.Module) -> int | None:
    """How many values the first layer inside a module reads; None if there is none."""
    first = next((layer for m in module.modules() if (layer := as_layer("", m)) is not None), None)
    return None if first is None else _size(first.module, first.in_axis)


def output_width(module: nn.Module) -> int | None:
    """How many values a layer makes; None if it is none."""
    layer = as_layer("", module)
    return None if layer is None else _size(module, layer.out_axis)


def narrows(layer: nn.Module) -> bool:
    """Whether a layer makes fewer values than it reads."""
    made, taken = output_width(layer), input_width(layer)
    return made is not None and taken is not None and made < taken


def keeps_width(block: nn.Module, layer: nn.Module | None = None) -> bool:
    """Whether this last layer of a block makes vectors as wide as the block takes, as the middle of a network does.

    >>> keeps_width(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))), keeps_width(nn.Linear(4, 3))
    (True, False)
    """
    last = layer if layer is not None else list(layers_in(block))[-1]
    made, taken = output_width(last), input_width(block)
    return made is None or taken is None or made == taken


def fits(layer: nn.Module, reader: nn.Module) -> bool:
    """Whether a module could read this layer's output by its size: flattened, concatenated or split."""
    made, taken = output_width(layer), input_width(reader)
    return made is None or taken is None or made % taken == 0 or taken % made == 0


def _size(module: nn.Module, axis: int) -> int | None:
    weight = module.weight  # a parametrized one is a tensor, not a Parameter
    return weight.shape[axis] if isinstance(weight, Tensor) else None
