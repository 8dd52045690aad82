"""How a head's tensors in a checkpoint lie in those of Megatron's layer, for both directions.

A family is a table of `Entry`. An entry names one parameter of the layer, the checkpoint's tensors
that lie in it, and an operation. An operation never computes: it says which part of the parameter
is which part of the tensor, as pairs of views. Copying along the pairs in one direction imports, in
the other exports, so the two cannot disagree and a round trip keeps every bit.

Shapes are written with the letters that the family declares, for example ``"2*A*D, H"``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Dims = Mapping[str, int]
Views = list[tuple[Tensor, Tensor]]  # (part of the layer's parameter, part of the source)


class Operation(Protocol):
    """One way in which sources lie in a parameter."""

    name: str

    def views(self, dims: Dims, index: int, target: Tensor, source: Tensor) -> Views:
        """Return pairs of views of equal shape that together cover source number ``index``."""


@dataclass(frozen=True)
class Copy:
    """The parameter is the source."""

    name: str = "copy"

    def views(self, dims: Dims, index: int, target: Tensor, source: Tensor) -> Views:
        """See `Operation`."""
        return [(target, source)]


@dataclass(frozen=True)
class Concatenate:
    """``parts`` sources of equal height, one below the other: gate above up, for example."""

    parts: int = 2
    name: str = "concatenate"

    def views(self, dims: Dims, index: int, target: Tensor, source: Tensor) -> Views:
        """See `Operation`."""
        return [(target.chunk(self.parts)[index], source)]


@dataclass(frozen=True)
class SwapHalves:
    """The source takes [hidden, embedding], Megatron's projection [embedding, hidden]."""

    name: str = "swap column halves"

    def views(self, dims: Dims, index: int, target: Tensor, source: Tensor) -> Views:
        """See `Operation`."""
        half = source.shape[1] // 2
        return [(target[:, half:], source[:, :half]), (target[:, :half], source[:, half:])]


@dataclass(frozen=True)
class GroupedQKV:
    """Sources q, k, v, weights or biases; the target holds [queries, (gates), k, v] per KV group.

    With A attention heads in G groups of head dimension D, a group takes A/G queries of D rows, as
    many gates if the attention output is gated, one key and one value. A gated ``q_proj`` holds,
    per head, D rows of the query and then D of its gate.

    With A = 2, G = 1, D = 1 and the rows of q_proj named q0 g0 q1 g1, the parameter's rows are
    q0 q1 g0 g1 k v.
    """

    gated: bool = False

    @property
    def name(self) -> str:
        """Shown in reports."""
        return "per group [queries, gates, k, v]" if self.gated else "per group [queries, k, v]"

    def views(self, dims: Dims, index: int, target: Tensor, source: Tensor) -> Views:
        """See `Operation`."""
        groups, size = dims["G"], dims["D"]
        queries = dims["A"] // groups
        kinds = 2 if self.gated else 1
        blocks = target.unflatten(0, (groups, kinds * queries + 2, size))
        if index > 0:
            return [(blocks[:, kinds * queries + index - 1], source.unflatten(0, (groups, size)))]
        # [groups, kind, query, D, ...] in the parameter, [groups, query, kind, D, ...] in q_proj
        ours = blocks[:, : kinds * queries].unflatten(1, (kinds, queries)).transpose(1, 2)
        return [(ours, source.unflatten(0, (groups, queries, kinds, size)))]


COPY, NORM, SLICE = Copy(), Copy("norm (stores w)"), Copy("slice")
GATE_UP, SWAP_HALVES = Concatenate(), SwapHalves()


@dataclass(frozen=True)
class Entry:
    """One row of a family's table.

    Attributes:
        target: Parameter of the MTP layer. ``{e}`` is the index of an expert on its rank.
        sources: Key and shape of each tensor in it, keys without the family's prefix. ``{e}`` is
            the index of an expert in the model. Where the target has one and a key does not, the
            tensor holds all experts in its first dimension, which its shape includes.
        operation: How they lie in it.
    """

    target: str
    sources: tuple[tuple[str, str], ...]
    operation: Operation = COPY

    @property
    def is_per_expert(self) -> bool:
        """Whether there is one parameter for each expert."""
        return "{e}" in self.target


@dataclass(frozen=True)
class Piece:
    """One source of one parameter.

    Attributes:
        key: The tensor's full name.
        row: Index into its first dimension, or None for all of it.
        shape: What the piece has to look like.
        tensor_shape: What the whole tensor has to look like.
    """

    key: str
    row: int | None
    shape: tuple[int, ...]
    tensor_shape: tuple[int, ...]

    def __str__(self) -> str:
        return self.key if self.row is None else f"{self.key}[{self.row}]"


@dataclass(frozen=True)
class Rule:
    """An entry for one model: keys in full, shapes in numbers, and one rule for each expert.

    Attributes:
        entry: The row of the table.
        expert: Index of the expert in the model, or None.
        pieces: The sources.
        dims: Values of the family's letters.
    """

    entry: Entry
    expert: int | None
    pieces: tuple[Piece, ...]
    dims: Dims

    def target(self, first_expert: int = 0) -> str:
        """The parameter's name on a rank whose experts start at ``first_expert``."""
        return self.entry.target.format(
            e=None if self.expert is None else self.expert - first_expert
        )

    @property
    def target_shape(self) -> tuple[int, ...]:
        """The parameter's shape: every operation stacks its sources along the first dimension."""
        first = self.pieces[0].shape
        return (sum(piece.shape[0] for piece in self.pieces), *first[1:])

    def views(self, index: int, target: Tensor, source: Tensor) -> Views:
        """Pairs of views for source number ``index``, see `Operation.views`.

        Raises:
            ValueError: The two do not fit: a view of one differs in shape from its partner.
        """
        pairs = self.entry.operation.views(self.dims, index, target, source)
        for ours, theirs in pairs:
            if ours.shape != theirs.shape:
                raise ValueError(
                    f"{self.pieces[index]} of shape {tuple(source.shape)} does not fit into "
                    f"{self.entry.target} of shape {tuple(target.shape)}"
                )
        return pairs


def expand(entries: Sequence[Entry], prefix: str, dims: Dims) -> tuple[Rule, ...]:
    """Turn a table into the rules of one model, experts in order.

    Args:
        entries: The table.
        prefix: What every key begins with.
        dims: Values of the letters; ``E``, the number of experts, if an entry is per expert.
    """
    rules = []
    for entry in entries:
        experts = range(dims["E"]) if entry.is_per_expert else [None]
        for expert in experts:
            pieces = tuple(
                _piece(prefix + key, shape_of(shape, dims), expert) for key, shape in entry.sources
            )
            rules.append(Rule(entry, expert, pieces, dims))
    return tuple(rules)


def shape_of(text: str, dims: Dims) -> tuple[int, ...]:
    """Read a shape: ``"2*A*D, H"`` with A=4, D=8, H=16 is ``(64, 16)``."""
    shape = []
    for term in text.split(","):
        size = 1
        for factor in term.split("*"):
            factor = factor.strip()
            size *= int(factor) if factor.isdigit() else dims[factor]
        shape.append(size)
    return tuple(shape)


def _piece(key: str, shape: tuple[int, ...], expert: int | None) -> Piece:
    if expert is None:
        return Piece(key, None, shape, shape)
    if "{e}" in key:
        return Piece(key.format(e=expert), None, shape, shape)
    return Piece(key, expert, shape[1:], shape)
