"""How names and numbers are written on the page."""

from __future__ import annotations

import math
import unicodedata

_MEASURES = """
dfi_per_dimension   | DfI per dimension        | deviation from isometry at the paper's scale √(out/in)
dfi_scale_free      | DfI, scale-free          | deviation at the matrix's own scale; a random square matrix has 1
effective_rank      | effective rank           | exp of the entropy of the singular values
stable_rank         | stable rank              | ‖W‖²_F ÷ σ²_max
participation_rank  | participation rank       | (Σσ²)² ÷ Σσ⁴
srank               | srank, δ = 0.01          | singular values that make up 99 % of their sum
pca_rank            | PCA rank                 | directions that hold 99 % of the energy
norm                | norm ‖W‖_F               | root of the summed squares
spectral_norm       | σ max                    | largest singular value
condition_number    | condition number         | σ max ÷ σ min
dead_rows           | zero rows                | neurons without any weight
dead_columns        | zero columns             | inputs that nothing reads
row_norm_spread     | spread of row norms      | standard deviation ÷ mean
similar_pairs       | similar pairs            | share of neuron pairs with |cosine| > 0.8
mean_squared_cosine | mean squared cosine      | between pairs of neurons
welch_ratio         | ratio to the Welch bound | 1 is as different as this many neurons can be
"""
_CHANGES = """
drift        | drift                       | ‖B − A‖ ÷ ‖A‖
sfe          | SFE                         | ‖B − A‖²_F
sfe_relative | SFE, relative               | ÷ ‖A‖²_F
frame        | frame                       | tr(Q_Aᵀ Q_B) ÷ k: 1 if only the spectrum changed
angle_out    | angle of leading outputs, ° | largest angle between the leading output directions
angle_in     | angle of leading inputs, °  | largest angle between the leading input directions
overlap_out  | overlap of leading outputs  | mean squared cosine of those angles
overlap_in   | overlap of leading inputs   | mean squared cosine of those angles
"""
_RECORD = """
scale           | scale                 | what the isometry is multiplied by
sfe_relative    | SFE, relative         | ‖W − W̃‖²_F ÷ ‖W‖²_F
residual        | residual              | DfI per dimension of the factor before it was stored
residual_stored | residual, stored      | the same of what was written
steps           | solver steps          |
completed       | directions completed  | singular values that were zero
fallback        | solved by float64 SVD | matrices that the fast solver missed
"""
GLOSSARY = """
plasticity     | how well a network can still learn something new; it is often lost in long training.
isometry       | a matrix all of whose singular values are equal: it passes every direction on with the same strength.
DfI            | deviation from isometry, ‖(W/s)(W/s)ᵀ − I‖²_F on the smaller side; 0 is an isometry at scale s.
SFE            | squared Frobenius error ‖W − W̃‖²_F: how much a weight was changed.
effective rank | exp of the entropy of the singular values: how many directions really count, at most k.
k              | the smaller side of a matrix, the number of its singular values.
"""


def listed(table: str) -> list[tuple[str, ...]]:
    """The rows of a table written as text, one line per row and " | " between cells.

    >>> listed("a | the first")
    [('a', 'the first')]
    """
    return [tuple(cell.strip() for cell in f"{line} ".split(" | ")) for line in table.strip().splitlines()]


# Measure → what it is called, and what it means in a few words.
MEASURES, CHANGES, RECORD = (
    {key: (called, meaning) for key, called, meaning in listed(table)} for table in (_MEASURES, _CHANGES, _RECORD)
)


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def printable(text: str) -> str:
    r"""Control characters made visible: a name in a hostile file must not control the terminal or the page.

    >>> printable("a\x1b[2Jb\u202ec")
    'a\\x1b[2Jb\\u202ec'
    """
    if text.isprintable():
        return text
    return "".join(c if c == "\t" or unicodedata.category(c)[0] != "C" else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def number(value: float | str | None, kind: str = "") -> str:
    r"""A number as text: three digits, powers of ten where it is far from 1, empty for none.

    >>> number(0.123456), number(2.5e-7), number(None), number(0.25, "share"), number(1234567)
    ('0.123', '2.5·10⁻⁷', '', '25\xa0%', '1,234,567')
    """
    if value is None or isinstance(value, str):
        return value or ""
    if not math.isfinite(value):
        return "∞" if value == math.inf else "−∞" if value == -math.inf else "NaN"
    if kind == "share":
        return (f"{value * 100:.2g}" if 0 < value < 0.1 else f"{value * 100:.0f}") + "\N{NO-BREAK SPACE}%"
    if float(value).is_integer() and abs(value) < 1e12:
        return f"{int(value):,}"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        mantissa, _, power = f"{value:.1e}".partition("e")
        return f"{mantissa}·10{str(int(power)).translate(_RAISED)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def size(count: float) -> str:
    """Bytes as text.

    >>> size(91_000_000)
    '91 MB'
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def plural(count: int, one: str, many: str = "") -> str:
    """A count with its noun.

    >>> plural(1, "matrix", "matrices"), plural(2, "layer")
    ('1 matrix', '2 layers')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"
