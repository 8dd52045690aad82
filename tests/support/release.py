"""The release of Megatron under test, where older ones that the series is ported to differ.

Up to 0.18 a call without labels trains no heads, nothing counts accepted tokens, and the tracker
calls its losses "values". Before 0.19 ``mtp_detach_heads`` comes with the port.
"""

from __future__ import annotations

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
