"""Support for the tests of Multi-Token Prediction: ranks, worlds, tiny models and batches.

A test module starts with::

    from tests.support import ModelSpec, build_model, parallel_world, prepare, run_ranks

    prepare()

and then runs unchanged on a machine with GPUs (NCCL) and on one without (gloo, and a stand-in for
the device). Importing this package neither imports Megatron nor replaces anything; `prepare` does.
"""

from tests.support.batches import Batch, bshd_batch, cp_shard, thd_batch
from tests.support.device import (
    backend,
    device,
    has_gpu,
    has_transformer_engine,
    prepare,
    seed_everything,
)
from tests.support.gradients import (
    all_reduce_gradients,
    grads_by_name,
    relative_error,
    worst_difference,
)
from tests.support.models import ModelSpec, build_config, build_model, copy_parameters, is_mtp_param
from tests.support.parallel import parallel_world
from tests.support.ranks import run_ranks
from tests.support.sharding import shard, unshard, zigzag_indices
from tests.support.standin import fp64_cross_entropy
from tests.support.targets import load_packed_targets
from tests.support.torchrun import launch

__all__ = [
    "Batch",
    "ModelSpec",
    "all_reduce_gradients",
    "backend",
    "bshd_batch",
    "build_config",
    "build_model",
    "copy_parameters",
    "cp_shard",
    "device",
    "fp64_cross_entropy",
    "grads_by_name",
    "has_gpu",
    "has_transformer_engine",
    "is_mtp_param",
    "launch",
    "load_packed_targets",
    "parallel_world",
    "prepare",
    "relative_error",
    "run_ranks",
    "seed_everything",
    "shard",
    "thd_batch",
    "unshard",
    "worst_difference",
    "zigzag_indices",
]
