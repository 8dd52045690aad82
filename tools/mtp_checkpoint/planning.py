"""Which tensor of the head goes into which shard, in which dtype, made of which parts.

An unchanged layout leaves every tensor where it is. Another layout puts each new tensor into one
of the shards that held what it replaces, so that shards keep about their sizes.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

import torch

from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.mapping import fill
from tools.mtp_checkpoint.rules import Rule
from tools.mtp_checkpoint.source import DTYPES, HFDirectory
from tools.mtp_checkpoint.splice import Output, in_order


@dataclass(frozen=True)
class Plan:
    """What an export writes.

    Attributes:
        shards: Outputs of each file that has to be rewritten, in order; an empty list drops it.
        parts: For each key of the head, the rules and indices of its pieces, in order.
        replaced: Keys of the checkpoint's own head, none of whose bytes are copied.
        index: The new index, or None when there is none or the old one stays right.
    """

    shards: dict[str, list[Output]]
    parts: dict[str, list[tuple[Rule, int]]]
    replaced: frozenset[str]
    index: dict | None

    def files(self) -> dict[str, str]:
        """The file of each key of the head."""
        return {
            output.key: name
            for name, outputs in self.shards.items()
            for output in outputs
            if output.source is None
        }


class Original:
    """The head in the checkpoint that is exported into, in its own layout."""

    def __init__(self, directory: HFDirectory, rules: tuple[Rule, ...]):
        self.directory = directory
        self._rules = {(rule.entry.target, rule.expert): rule for rule in rules}
        self.tensor = functools.lru_cache(maxsize=2)(self._tensor)

    def rule(self, like: Rule) -> Rule:
        """The rule in this layout for the parameter of a rule in another."""
        return self._rules[like.entry.target, like.expert]

    def dtype(self, rule: Rule, index: int) -> str:
        """The dtype that a piece of a rule, in whatever layout, has here."""
        key = rule.pieces[index].key
        if key in self.directory.tensors:
            return self.directory.tensors[key].dtype
        found = {self.directory.tensors[piece.key].dtype for piece in self.rule(rule).pieces}
        if len(found) > 1:
            raise CheckpointError(
                f"{key} would be made of tensors in {' and '.join(sorted(found))}; export in the "
                "checkpoint's own layout"
            )
        return found.pop()

    def _tensor(self, target: str, expert: int | None) -> torch.Tensor:
        """The parameter as this checkpoint has it, in float32, which holds all dtypes exactly."""
        rule = self._rules[target, expert]
        parameter = torch.empty(rule.target_shape)
        fill(rule, self.directory, parameter)
        return parameter


def make_plan(original: Original, rules: tuple[Rule, ...]) -> Plan:
    """Plan an export of a head, by rules of any layout, into a checkpoint.

    Raises:
        CheckpointError: A tensor would be made of tensors of different dtypes.
    """
    directory = original.directory
    parts: dict[str, list[tuple[Rule, int]]] = {}
    for rule in rules:
        for index, piece in enumerate(rule.pieces):
            parts.setdefault(piece.key, []).append((rule, index))
    replaced = frozenset(p.key for rule in rules for p in original.rule(rule).pieces)
    followers: dict[str, list[Output]] = {}
    gained: Counter[str] = Counter()
    for key, pieces in parts.items():
        output = _output(original, key, pieces)
        place = key if key in directory.tensors else _place(original, output, pieces, gained)
        followers.setdefault(place, []).append(output)
    shards = {}
    for name, header in directory.headers.items():
        if not any(info.key in replaced for info in header.tensors):
            continue
        outputs: list[Output] = []
        for info in header.tensors:
            if info.key in replaced:
                outputs += followers.get(info.key, [])
            else:
                outputs.append(Output.kept(info))
        shards[name] = in_order(outputs, header)
    return Plan(shards, parts, replaced, _index(directory, shards))


def _place(
    original: Original, output: Output, pieces: list[tuple[Rule, int]], gained: Counter[str]
) -> str:
    """The key of the checkpoint in whose place a new one goes.

    Args:
        original: The checkpoint's own head.
        output: The new tensor.
        pieces: What it is made of.
        gained: Bytes by which each shard has grown so far; updated.
    """
    tensors = original.directory.tensors
    replaced = {piece.key for rule, _ in pieces for piece in original.rule(rule).pieces}
    share: Counter[str] = Counter()  # of the new tensor's bytes, by shard
    for name in replaced:
        share[tensors[name].file] += tensors[name].nbytes
    total = sum(share.values())
    for file, nbytes in share.items():
        gained[file] -= output.nbytes * nbytes // total
    file = min(sorted(share), key=gained.__getitem__)
    gained[file] += output.nbytes
    return min((n for n in replaced if tensors[n].file == file), key=lambda n: tensors[n].start)


def _output(original: Original, key: str, pieces: list[tuple[Rule, int]]) -> Output:
    dtypes = {original.dtype(rule, index) for rule, index in pieces}
    if len(dtypes) > 1:
        raise CheckpointError(
            f"{key} would be made of tensors in {' and '.join(sorted(dtypes))}; export in the "
            "checkpoint's own layout"
        )
    (dtype,) = dtypes
    rule, index = pieces[0]
    shape = rule.pieces[index].tensor_shape
    return Output(key, dtype, shape, torch.Size(shape).numel() * DTYPES[dtype].itemsize)


def _index(directory: HFDirectory, shards: dict[str, list[Output]]) -> dict | None:
    if directory.index is None:
        return None
    files = {info.key: info for info in directory.tensors.values() if info.file not in shards}
    weight_map = {key: info.file for key, info in files.items()}
    total = sum(info.nbytes for info in files.values())
    for name, outputs in shards.items():
        weight_map.update((output.key, name) for output in outputs)
        total += sum(output.nbytes for output in outputs)
    metadata = {**(directory.index.get("metadata") or {}), "total_size": total}
    ordered = dict(sorted(weight_map.items()))
    index = {**directory.index, "metadata": metadata, "weight_map": ordered}
    return None if index == directory.index else index


