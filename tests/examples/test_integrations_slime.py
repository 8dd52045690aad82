"""miles 0.0.2, slime's twin on PyPI, takes whole steps with the edit of docs/integrations.md.

    make clients && python -m pytest tests/examples/test_integrations_slime.py
"""

import argparse
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch

from tests.examples.integration_support import (
    direct,
    gradients,
    heads,
    masks_of,
    policy,
    tiny,
    tokens_of,
)
from tests.support import (
    fp64_cross_entropy,
    grads_by_name,
    parallel_world,
    prepare,
    run_ranks,
    worst_difference,
)
from tests.examples.clients import import_client, needs_client
from tests.support.objective import nonzero

prepare()
pytestmark = needs_client("miles")

STEP = ((3, 5), (2, 6), (4, 3), (1, 2))
# 16, because Megatron divides by it in float32.
ANSWERS = sum(answer for _, answer in STEP)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"
LAYOUTS = [(2, 1), (1, 2)]  # context- and data-parallel sizes


@pytest.fixture(scope="module")
def found_by_two():
    """What each of two ranks found in every layout."""
    return run_ranks(steps, 2, LAYOUTS, timeout=240)


@pytest.fixture(scope="module", params=[(1, 1), *LAYOUTS], ids=str)
def found(request):
    """What every rank found in one layout."""
    if request.param == (1, 1):
        return [found[1, 1] for found in run_ranks(steps, 1, [(1, 1)], timeout=120)]
    return [found[request.param] for found in request.getfixturevalue("found_by_two")]


def test_heads_train_on_the_sequence_mean_as_the_policy_does(found):
    weights = [mask / mask.sum() for mask in masks_of(STEP)]
    wanted = whole_step(len(STEP), weights)
    for rank in found:
        assert worst_difference(heads(rank["sequence mean"]), wanted)[0] <= 1e-12


def test_heads_train_on_the_token_mean_where_the_policy_does(found):
    wanted = whole_step(ANSWERS, masks_of(STEP))
    for rank in found:
        assert worst_difference(heads(rank["token mean"]), wanted)[0] <= 1e-12


def test_nothing_but_heads_trains_when_the_policy_loss_is_zero(found):
    for rank in found:
        assert nonzero(rank["sequence mean"]) == nonzero(heads(rank["sequence mean"])) != set()


def test_the_policy_gets_the_gradients_of_a_run_without_heads_to_the_bit(found):
    for rank in found:
        with_heads, without = policy(rank["sft"]), rank["no heads"]
        assert with_heads.keys() == without.keys() == nonzero(without)
        assert all(torch.equal(with_heads[name], without[name]) for name in without)


def test_heads_rest_without_enable_mtp_training(found):
    for rank in found:
        assert not nonzero(heads(rank["disabled"])) and nonzero(policy(rank["disabled"]))


def test_contiguous_context_parallelism_is_refused():
    (message,) = run_ranks(refused, 2)[:1]
    assert "zigzag context parallelism" in message


def whole_step(normalizer, weights):
    """Gradients of our own call on all trajectories at once, in a world of one rank."""
    from megatron.core.transformer.mtp_objective import pack_trajectories

    with parallel_world() as groups, fp64_cross_entropy():
        model = tiny(groups)
        mask = pack_trajectories(tokens_of(STEP), weights).loss_mask
        output = direct(model, groups, STEP, loss_mask=mask, mtp_loss_normalizer=normalizer)
        return heads(gradients(model, groups, 0 * output.sum()))


def steps(layouts):
    import_client("miles")
    found = {}
    for cp, dp in layouts:
        with parallel_world(cp=cp) as groups, fp64_cross_entropy():
            set_parallel_state(groups)
            none = f"{__name__}.no_loss"
            found[cp, dp] = {
                "sequence mean": train(groups, loss=none),
                "token mean": train(groups, loss=none, per_token=True),
                "sft": train(groups),
                "disabled": train(groups, enable_mtp_training=False),
                "no heads": train(groups, enable_mtp_training=False, mtp_num_layers=None),
            }
    return found


def set_parallel_state(groups):
    from miles.backends.training_utils.parallel import GroupInfo, ParallelState
    from miles.backends.training_utils.parallel import set_parallel_state as keep

    of = lambda group: GroupInfo(group.rank(), group.size(), group)  # noqa: E731
    names = dict(intra_dp="dp", intra_dp_cp="dp_cp", cp="cp", tp="tp", pp="pp", ep="ep", etp="tp")
    keep(ParallelState(**{name: of(getattr(groups, group)) for name, group in names.items()}))


def no_loss(args, batch, logits, sum_of_sample_mean):
    """A custom loss of miles: nothing to learn for the policy."""
    loss = 0 * logits.sum()
    return loss, {"loss": loss.detach()}


class Arguments(argparse.Namespace):
    """miles' arguments: None where nothing else is said."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class NoDumper:
    """In place of miles' debugging dumps, which need SGLang."""

    def __init__(self, *_):
        self.wrap_forward_step = lambda forward_step: forward_step

    def finalize(self, model):
        """Nothing was dumped."""


class Recorder:
    """An optimizer that keeps the gradients of the step."""

    def __init__(self, model):
        self.model = model

    def zero_grad(self):
        """DDP's buffers hold them."""

    def step(self, **_increment):
        """Successful, no norm, no count of zeros; a scheduler's step as well."""
        self.gradients = grads_by_name(self.model)
        return True, None, None


def edited_train_one_step():
    """miles' own function with the lines that the page replaces, and its globals."""
    from miles.backends.megatron_utils import model

    from examples.integrations.mtp_slime import mtp_forward_kwargs

    edit = r"^```python\n# (?:remove|add)\n(.*?)^```$"
    removed, added = re.findall(edit, PAGE.read_text(), re.M | re.S)
    source = inspect.getsource(model.train_one_step)
    assert source.count(textwrap.indent(removed, " " * 12)) == 1
    source = source.replace(*(textwrap.indent(lines, " " * 12) for lines in (removed, added)))
    names = dict(vars(model), mtp_forward_kwargs=mtp_forward_kwargs, DumperMegatronUtil=NoDumper)
    exec(compile(source, model.__file__, "exec"), names)
    return names["train_one_step"], names


def train(groups, loss=None, per_token=False, enable_mtp_training=True, mtp_num_layers=2):
    """Gradients of one step of miles: two microbatches on this data-parallel rank, or one."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed import finalize_model_grads
    from miles.backends.training_utils.data import DataIterator

    dtype = torch.float64 if loss else torch.float32  # miles' own losses take no other logits
    model = tiny(groups, per_token, dtype, mtp_num_layers=mtp_num_layers)
    model.config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    own = range(groups.dp.rank(), len(STEP), groups.dp.size())
    tokens, masks = tokens_of(STEP), masks_of(STEP)
    rollout = {
        "tokens": [tokens[i] for i in own],
        "loss_masks": [masks[i][STEP[i][0] :].int() for i in own],
        "total_lengths": [sum(STEP[i]) for i in own],
        "response_lengths": [STEP[i][1] for i in own],
    }
    args = Arguments(
        enable_mtp_training=enable_mtp_training,
        mtp_num_layers=mtp_num_layers,
        calculate_per_token_loss=per_token,
        loss_type="custom_loss" if loss else "sft_loss",
        custom_loss_function_path=loss,
        qkv_format="thd",
        data_pad_size_multiplier=4,
        global_batch_size=len(STEP),
        use_dynamic_global_batch_size=False,
        check_for_nan_in_loss_and_grad=True,
        rollout_temperature=1.0,
        seq_length=32,
        micro_batch_size=1,
        log_probs_chunk_size=-1,
    )
    step, names = edited_train_one_step()
    names["get_args"] = lambda: args
    recorder = Recorder(model)
    iterator = [DataIterator(rollout, micro_batch_size=2)]
    step(args, 0, 0, iterator, [ddp], recorder, recorder, len(own) // 2)
    return recorder.gradients


def refused():
    from examples.integrations.mtp_slime import mtp_forward_kwargs

    with parallel_world(cp=2):
        args = Arguments(enable_mtp_training=True, allgather_cp=True)
        with pytest.raises(ValueError) as error:
            mtp_forward_kwargs(args, {}, 1, 1)
        return str(error.value)
