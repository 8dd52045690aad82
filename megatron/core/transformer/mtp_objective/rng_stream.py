"""Random numbers of isolated heads, drawn from a stream of their own.

Dropout of the heads would move the generators that the policy draws from next, so that training
them changes the policy although no gradient reaches it. Inside `own_random_stream` every generator
is seeded from a hash of the state it had, and afterwards gets that state back: the policy's draws
are those of a run without heads, the heads' draws differ from them and from step to step, ranks
that shared a state still share one, and a resumed run repeats both exactly, because nothing is kept
between calls.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from typing import TYPE_CHECKING, Callable, Iterator, Optional, Sequence

import torch
from torch import Tensor

from megatron.core.tensor_parallel import random as rng
from megatron.core.transformer.transformer_block import get_num_layers_to_build

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

# Configuration fields that let a layer draw random numbers, when they are set.
_RANDOM_FIELDS = (
    "hidden_dropout",
    "attention_dropout",
    "moe_input_jitter_eps",
    "moe_router_force_load_balancing",
    "moe_router_force_biased",
    "fp4",
)


def shares_random_stream(
    config: TransformerConfig, is_hybrid: bool, pp_rank: Optional[int] = None
) -> bool:
    """Whether heads on this rank draw from generators that decoder layers draw from as well.

    Where no decoder layer is, nothing moves the generators but the heads: they keep upstream's
    stream, since a seed derived from a state that never moves would repeat the same draws.

    Args:
        config: of the model; read on its pipeline rank, once, when the heads are built.
        is_hybrid: the model is a ``HybridModel``, whose heads share the last stage with layers.
        pp_rank: pipeline rank; None takes that of ``parallel_state``.

    Raises:
        ValueError: ``mtp_isolated_loss`` where the streams cannot be separated: generators held
            by CUDA graphs, or layers interleaved by ``overlap_moe_expert_parallel_comm``.
    """
    drawing = [field for field in _RANDOM_FIELDS if getattr(config, field)]
    if not drawing or not (is_hybrid or _has_decoder_layers(config, pp_rank)):
        return False
    if config.mtp_isolated_loss:
        _require_separable_streams(config, drawing)
    return True


def with_own_random_stream(forward: Callable) -> Callable:
    """Let a block's ``forward`` draw from a stream of its own where the objective is isolated.

    The block has ``config`` and ``shares_random_stream``. A configuration with ``mtp_detach_heads``
    but not ``mtp_isolated_loss`` keeps upstream's stream, as does every attached call.
    """

    @functools.wraps(forward)
    def in_own_stream(block, *args, **kwargs):
        config, isolated = block.config, kwargs.get("mtp_isolated_loss")
        if isolated is None:
            isolated = config.mtp_isolated_loss
        only_detached = config.mtp_detach_heads and not config.mtp_isolated_loss
        if not isolated or only_detached or not block.shares_random_stream:
            return forward(block, *args, **kwargs)
        with own_random_stream():
            return forward(block, *args, **kwargs)

    return in_own_stream


@contextlib.contextmanager
def own_random_stream() -> Iterator[None]:
    """Draw from other streams inside the block; every generator is as before after it.

    Covers the device's generator, all of the model-parallel tracker and the CPU's. States are small
    tensors on the host, so there is no synchronisation with the device.

    Raises:
        ValueError: the tracker's generators are held by CUDA graphs.
    """
    _require_values(("a call with mtp_isolated_loss=True",))
    with rng._fork_rng():
        host, device, tracked = rng._get_all_rng_states()
        states = {name: _seeded(_seed(name, state)) for name, state in sorted(tracked.items())}
        rng.get_cuda_rng_tracker().set_states(states)
        torch.default_generator.manual_seed(_seed("host", host))
        torch.cuda.manual_seed(_seed("device", device))
        yield


def _has_decoder_layers(config: TransformerConfig, pp_rank: Optional[int]) -> bool:
    """Whether this pipeline rank holds decoder layers, in any of its virtual stages."""
    if config.pipeline_model_parallel_size == 1:
        return True
    layout = config.pipeline_model_parallel_layout
    chunks = config.virtual_pipeline_model_parallel_size
    for stage in [None] if chunks is None else range(chunks):
        if layout is None:
            layers = get_num_layers_to_build(config, stage, pp_rank)
        else:
            layers = layout.get_num_layers_to_build(vp_stage=stage, pp_rank=pp_rank)
        if layers > 0:
            return True
    return False


def _require_separable_streams(config: TransformerConfig, drawing: Sequence[str]) -> None:
    _require_values(drawing)
    if config.overlap_moe_expert_parallel_comm:
        raise ValueError(
            "mtp_isolated_loss gives the MTP heads a random stream of their own, but with "
            "overlap_moe_expert_parallel_comm their layers run between the decoder's: set "
            f"{', '.join(drawing)} to 0 (or off), or drop overlap_moe_expert_parallel_comm."
        )


def _require_values(drawing: Sequence[str]) -> None:
    """Refuse generators that CUDA graphs hold: they are no values to save and restore."""
    if rng.is_graph_safe_cuda_rng_tracker(rng.get_cuda_rng_tracker()):
        raise ValueError(
            "mtp_isolated_loss gives the MTP heads a random stream of their own, which needs "
            "Megatron's plain random tracker, but got one made for CUDA graphs. Random numbers "
            f"are drawn because of {', '.join(drawing)}: set them to 0 (or off), or drop "
            "use_te_rng_tracker and CUDA graphs."
        )


def _seed(name: str, state: Tensor) -> int:
    """63 bits that depend on a stream's name and its state, a byte tensor on the host."""
    digest = hashlib.blake2b(state.numpy().tobytes(), key=name.encode()[:64], digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1


def _seeded(seed: int) -> Tensor:
    """The state of the device's generator after seeding it."""
    torch.cuda.manual_seed(seed)
    return torch.cuda.get_rng_state()
