"""What studies/advice.yaml needs beside the laboratory's own: two networks."""

from torch import Tensor, nn

from rekindle import lab


@lab.network("own-residual")
class Residual(nn.Module):
    """An MLP with LayerNorm, GELU and skips."""

    def __init__(self, shape: tuple[int, ...], classes: int, *, width: int = 96, layers: int = 3) -> None:
        super().__init__()
        size = 1
        for side in shape:
            size *= side
        self.first = nn.Linear(size, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = self.first(x.flatten(1))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + nn.functional.gelu(layer(norm(x)))
        out: Tensor = self.head(x)
        return out


@lab.network("own-conv")
def conv(shape: tuple[int, ...], classes: int, *, width: int = 16) -> nn.Module:
    """Two convolutions with BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(shape[0], width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * ((shape[1] + 1) // 2) * ((shape[2] + 1) // 2), classes),
    )
