"""The Multi-Token Prediction (MTP) objective: targets, isolation, normalisation.

What a trainer needs is exported here; the modules say how each part works.
"""

from megatron.core.transformer.mtp_objective.batches import (
    PackedTrajectories,
    PaddedTrajectories,
    pack_trajectories,
    pad_trajectories,
)
from megatron.core.transformer.mtp_objective.layout import SequenceLayout
from megatron.core.transformer.mtp_objective.shift import shift_fields
from megatron.core.transformer.mtp_objective.targets import (
    IGNORED_LABEL,
    DepthTargets,
    depth_targets,
)
from megatron.core.transformer.mtp_objective.trajectories import prediction_aligned_targets
from megatron.core.transformer.mtp_objective.weighting import (
    WEIGHTINGS,
    Targets,
    WeighedTargets,
    weigh_microbatches,
)

__all__ = [
    "DepthTargets",
    "IGNORED_LABEL",
    "PackedTrajectories",
    "PaddedTrajectories",
    "SequenceLayout",
    "Targets",
    "WEIGHTINGS",
    "WeighedTargets",
    "depth_targets",
    "pack_trajectories",
    "pad_trajectories",
    "prediction_aligned_targets",
    "shift_fields",
    "weigh_microbatches",
]
