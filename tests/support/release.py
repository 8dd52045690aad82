"""The release of Megatron under test, where older ones that the series is ported to differ.

Up to 0.18 a call without labels trains no heads, nothing counts accepted tokens, and the tracker
calls its losses "values". Up to 0.17 HybridModel is MambaModel, heads get no padding mask, and
GPTModel takes no output_processor.
"""

from __future__ import annotations

from types import ModuleType

import pytest


def release() -> tuple[int, int]:
    """(major, minor) of megatron.core."""
    from megatron.core import package_info

    return package_info.MAJOR, package_info.MINOR


def derives_targets() -> bool:
    """Whether a call without labels trains the heads on its input ids."""
    return release() >= (0, 19)


def require_derived_targets() -> None:
    """Skip the test on a release where a call without labels trains no heads."""
    if not derives_targets():
        pytest.skip("without labels this release trains no heads")


def counts_acceptance() -> bool:
    """Whether the release itself counts right predictions, in its tracker."""
    return release() >= (0, 19)


def require_acceptance_counts() -> None:
    """Skip the test on a release that does not count acceptance by itself."""
    if not counts_acceptance():
        pytest.skip("this release counts no acceptance in its tracker")


def loss_key() -> str:
    """What the release's tracker calls its losses."""
    return "loss_values" if release() >= (0, 19) else "values"


def hybrid_block() -> ModuleType:
    """The module of the stack that mixes layers of several kinds."""
    if release() >= (0, 18):
        from megatron.core.models.hybrid import hybrid_block as module
    else:
        from megatron.core.ssm import mamba_block as module
    return module


def hybrid_model() -> type:
    """The model on that stack."""
    if release() >= (0, 18):
        from megatron.core.models.hybrid.hybrid_model import HybridModel as Model
    else:
        from megatron.core.models.mamba.mamba_model import MambaModel as Model
    return Model


def require_padding_mask() -> None:
    """Skip the test on a release whose heads get no padding mask."""
    if release() < (0, 18):
        pytest.skip("this release hands no padding mask to its heads")


def has_output_processor() -> bool:
    """Whether GPTModel's forward takes a hook for its output."""
    return release() >= (0, 18)


def require_output_processor() -> None:
    """Skip the test on a release whose GPTModel takes no hook for its output."""
    if not has_output_processor():
        pytest.skip("GPTModel of this release takes no output_processor")


def require_overlap_on_one_stage() -> None:
    """Skip the test on a release that overlaps the experts of heads in a pipeline only."""
    if release() < (0, 18):
        pytest.skip("this release overlaps the experts of heads in a pipeline only")


def forget_moe_metrics() -> None:
    """Empty what the release logs about experts."""
    if release() >= (0, 18):
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

        destroy_moe_metrics_tracker()
    else:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        get_moe_layer_wise_logging_tracker().clear()
