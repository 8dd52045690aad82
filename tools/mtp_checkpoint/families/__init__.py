"""The families of models whose heads can be read and written.

A new family is one more table: make a `Family`, and add it to `FAMILIES`. Letters that tables use:

    H hidden size            A attention heads        G key-value heads (groups)   D head dimension
    E routed experts         I expert width           S shared-expert width        F dense width
"""

from __future__ import annotations

from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.families.deepseek_v3 import DEEPSEEK_V3
from tools.mtp_checkpoint.families.family import Family, Requirement
from tools.mtp_checkpoint.families.mimo import MIMO
from tools.mtp_checkpoint.families.qwen3_5 import QWEN3_5
from tools.mtp_checkpoint.families.qwen3_5_moe import QWEN3_5_MOE
from tools.mtp_checkpoint.source import HFDirectory

__all__ = ["FAMILIES", "Family", "Requirement", "by_name", "detect"]

FAMILIES = [QWEN3_5_MOE, QWEN3_5, DEEPSEEK_V3, MIMO]


def detect(directory: HFDirectory) -> Family:
    """Return the family of a checkpoint, from the ``model_type`` in its config.json.

    Raises:
        CheckpointError: It is none of `FAMILIES`.
    """
    found = [directory.config.get("model_type"), directory.text_config.get("model_type")]
    for family in FAMILIES:
        if any(model_type in family.model_types for model_type in found):
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise CheckpointError(
        f"model_type {directory.config.get('model_type')!r} is not known; known are {known}"
    )


def by_name(name: str) -> Family:
    """Return the family with this name.

    Raises:
        CheckpointError: There is none.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    raise CheckpointError(f"there is no family {name!r}; there are {[f.name for f in FAMILIES]}")
