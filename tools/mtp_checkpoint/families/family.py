"""What a family of models declares about its MTP head, and what is checked from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.families.checks import Check
from tools.mtp_checkpoint.families.rotary import rotary_problems
from tools.mtp_checkpoint.rules import Dims, Entry, Rule, expand
from tools.mtp_checkpoint.source import DTYPES, HFDirectory, dtype_problem

_ROWS = 8192  # compared at a time
_OWN_EMBEDDING = "A head with an embedding or output layer of its own is not supported"


@dataclass(frozen=True)
class Requirement:
    """A field of config.json that must have one value for the table to be right.

    Attributes:
        name: The field, in the text configuration.
        value: What it must be.
        reason: Why, and what else is there.
        default: What an absent field means.
    """

    name: str
    value: Any
    reason: str
    default: Any = None


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        name: Shown in reports.
        model_types: Values of ``model_type`` in config.json, outer or text configuration.
        prefix: What every key of the head begins with; ``{field}`` is a field of config.json.
        dims: The letters of the shapes: a field, or a sum of fields, of config.json.
        layouts: The table of each layout that such a checkpoint can have.
        requirements: What config.json must say.
        fields: What else it must have, because the layer is built from it.
        checks: What the layer needs of several fields together, or of their values.
        rotary: Kinds of rotary embedding that the layer computes; empty for not checked.
        copies: Keys, and the keys they must equal, that such a checkpoint may hold beside the head:
            copies of the target's tensors. They are not imported, and exported unchanged.
        zero_centred_norms: Whether a norm with weight w multiplies by 1 + w.
        feedback: For each engine of `tools.mtp_checkpoint.engines`, which hidden state of the
            layer its next draft step reads: "post-norm", behind the layer's closing norm, or
            "pre-norm", before it. What is not there is not known.
    """

    name: str
    model_types: tuple[str, ...]
    prefix: str
    dims: Mapping[str, str]
    layouts: Mapping[str, tuple[Entry, ...]]
    requirements: tuple[Requirement, ...] = ()
    fields: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    rotary: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    zero_centred_norms: bool = False
    feedback: Mapping[str, str] = field(default_factory=dict)

    def key_prefix(self, config: Mapping[str, Any]) -> str:
        """What every key of this model's head begins with."""
        return self.prefix.format_map(_Fields(config))

    def dimensions(self, config: Mapping[str, Any]) -> Dims:
        """The values of the letters.

        Raises:
            CheckpointError: A field is missing or is no positive integer.
        """
        fields = _Fields(config)
        return {
            letter: sum(fields[name] for name in text.split("+"))
            for letter, text in self.dims.items()
        }

    def rules(self, config: Mapping[str, Any], layout: str) -> tuple[Rule, ...]:
        """All rules of a model in one of the family's layouts.

        Args:
            config: The text configuration.
            layout: One of `layouts`.

        Raises:
            CheckpointError: The family has no such layout, or config.json lacks a field.
        """
        if layout not in self.layouts:
            raise CheckpointError(
                f"{self.name} has no layout {layout!r}; it has {', '.join(self.layouts)}"
            )
        return expand(self.layouts[layout], self.key_prefix(config), self.dimensions(config))

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """What in the text configuration this tool cannot represent."""
        problems = [
            f"{need.name} is {found!r}, expected {need.value!r}: {need.reason}"
            for need in self.requirements
            if (found := config.get(need.name, need.default)) != need.value
        ]
        problems += [
            f"config.json has no {name}, which the layer is built from"
            for name in self.fields
            if config.get(name) is None
        ]
        problems += rotary_problems(config, self.rotary) if self.rotary else []
        problems += [problem for check in self.checks for problem in check(config)]
        try:
            dims = self.dimensions(config)
        except CheckpointError as error:
            return problems + list(error.problems)
        if "G" in dims and dims["A"] % dims["G"]:
            problems.append(
                f"{dims['A']} attention heads cannot be divided into {dims['G']} key-value groups"
            )
        return problems

    def layout(self, directory: HFDirectory) -> str:
        """The layout that the directory's keys have; the first one where none shows.

        Raises:
            CheckpointError: Keys of more than one layout are there.
        """
        config = directory.text_config
        keys = {name: _keys(self.rules(config, name)) for name in self.layouts}
        times = Counter(key for found in keys.values() for key in found)
        marks = {
            name: sorted(k for k in found if times[k] == 1 and k in directory.tensors)
            for name, found in keys.items()
        }
        present = {name: found for name, found in marks.items() if found}
        if len(self.layouts) > 1 and len(present) > 1:
            counts = " and ".join(
                f"{len(found)} of {name} (such as {found[0]})" for name, found in present.items()
            )
            raise CheckpointError(f"mixed layouts: there are keys {counts}; expected one layout")
        return next(iter(present), next(iter(self.layouts)))

    def problems(self, directory: HFDirectory) -> list[str]:
        """Everything that would make an import fail and shows in config.json or the headers."""
        config = directory.text_config
        problems = self.config_problems(config)
        try:
            rules = self.rules(config, self.layout(directory))
        except CheckpointError as error:
            return problems + [p for p in error.problems if p not in problems]
        return problems + self._key_problems(directory, rules)

    def check(self, directory: HFDirectory) -> tuple[Rule, ...]:
        """Return the rules for a directory in which nothing is wrong.

        Raises:
            CheckpointError: With everything that `problems` finds.
        """
        if problems := self.problems(directory):
            raise CheckpointError(*problems)
        return self.rules(directory.text_config, self.layout(directory))

    def copied_keys(self, directory: HFDirectory) -> dict[str, str]:
        """The copies that are there, and what each is a copy of."""
        prefix = self.key_prefix(directory.text_config)
        pairs = {prefix + key: of for key, of in self.copies.items()}
        return {key: of for key, of in pairs.items() if key in directory.tensors}

    def _copy_problems(self, directory: HFDirectory) -> list[str]:
        """Copies that cannot be any, by their headers."""
        return [
            f"{key} is no copy of {of}: they differ in shape or dtype. {_OWN_EMBEDDING}"
            for key, of in self.copied_keys(directory).items()
            if not _same_kind(directory, key, of)
        ]

    def check_copies(self, directory: HFDirectory) -> None:
        """Read the copies and refuse those that are none: the head would have its own embedding.

        Raises:
            CheckpointError: One differs from what it should be a copy of.
        """
        for key, of in self.copied_keys(directory).items():
            same, count = _same_kind(directory, key, of), directory.tensors[key].shape[0]
            for start in range(0, count if same else 0, _ROWS):
                rows = (directory.read_rows(name, start, start + _ROWS) for name in (key, of))
                same = same and torch.equal(*rows)
            if not same:
                raise CheckpointError(f"{key} is no copy of {of}. {_OWN_EMBEDDING}")

    def _key_problems(self, directory: HFDirectory, rules: tuple[Rule, ...]) -> list[str]:
        shapes = {piece.key: piece.tensor_shape for rule in rules for piece in rule.pieces}
        missing = [key for key in shapes if key not in directory.tensors]
        problems = _some(missing, "missing") + self._copy_problems(directory)
        prefix = self.key_prefix(directory.text_config)
        allowed = shapes.keys() | self.copied_keys(directory).keys()
        extra = [k for k in directory.tensors if k.startswith(prefix) and k not in allowed]
        problems += _some(extra, "of the head but not known to this tool")
        further = [k for k in directory.tensors if _is_of_a_further_layer(k, prefix)]
        problems += _some(further, "of a further layer; heads of one layer are supported")
        for key, shape in shapes.items():
            info = directory.tensors.get(key)
            if info is not None and info.shape != shape:
                problems.append(f"{key} has shape {info.shape}, config.json asks for {shape}")
            if info is not None and info.dtype not in DTYPES:
                problems.append(dtype_problem(info))
        return problems


class _Fields(dict):
    """Fields of config.json, which must be there and be positive integers."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)

    def __missing__(self, name: str) -> Any:
        raise CheckpointError(f"config.json has no {name}, which the shapes depend on")

    def __getitem__(self, name: str) -> int:
        value = super().__getitem__(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{name} in config.json is {value!r}, expected a number above 0")
        return value


def _is_of_a_further_layer(key: str, prefix: str) -> bool:
    """Whether a key continues the count that a prefix such as ``model.layers.61.`` ends in."""
    stem, _, number = prefix.removesuffix(".").rpartition(".")
    if not number.isdigit() or not key.startswith(stem + "."):
        return False
    other = key[len(stem) + 1 :].partition(".")[0]
    return other.isdigit() and int(other) > int(number)


def _same_kind(directory: HFDirectory, key: str, of: str) -> bool:
    info, target = directory.tensors[key], directory.tensors.get(of)
    return target is not None and (info.shape, info.dtype) == (target.shape, target.dtype)


def _keys(rules: tuple[Rule, ...]) -> set[str]:
    return {piece.key for rule in rules for piece in rule.pieces}


def _some(keys: list[str], what: str) -> list[str]:
    """One problem for many keys: 768 lines about experts help nobody."""
    if not keys:
        return []
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    verb = "is" if len(keys) == 1 else "are"
    return [f"{', '.join(keys[:3])}{more} {verb} {what}"]
