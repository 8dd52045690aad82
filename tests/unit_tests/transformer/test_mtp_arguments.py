"""The config fields of the series are command-line flags of Megatron's own parser.

Run: pytest tests/unit_tests/transformer/test_mtp_arguments.py
"""

import argparse
import dataclasses

import pytest

from tests.support.device import prepare

prepare()

from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.training.arguments import add_megatron_arguments  # noqa: E402


@pytest.fixture(scope="module")
def parser():
    parser = argparse.ArgumentParser()
    add_megatron_arguments(parser)
    return parser


def config_of(arguments: argparse.Namespace) -> TransformerConfig:
    """The config of the parsed fields that concern MTP."""
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    values = {name: value for name, value in vars(arguments).items() if name in fields}
    mtp = {name: value for name, value in values.items() if name.startswith("mtp_")}
    return TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, **mtp)


def test_without_flags_nothing_is_isolated_and_weights_are_upstreams(parser):
    config = config_of(parser.parse_args([]))
    assert not config.mtp_isolated_loss and not config.mtp_detach_heads
    assert config.mtp_loss_mask_mode == "target"
    assert config.mtp_loss_normalization == "microbatch"


def test_flags_reach_the_config(parser):
    flags = "--mtp-num-layers 2 --mtp-isolated-loss --mtp-loss-mask-mode path"
    flags += " --mtp-loss-normalization global"
    config = config_of(parser.parse_args(flags.split()))
    assert config.mtp_isolated_loss and config.mtp_detach_heads
    assert config.mtp_loss_mask_mode == "path"
    assert config.mtp_loss_normalization == "global"


def test_help_says_what_each_flag_does(parser):
    # Not parser.format_help(): in 0.19.2 it fails on a "%" in the help of another flag.
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    isolated = " ".join(actions["--mtp-isolated-loss"].help.split())
    assert "trains nothing but the MTP heads" in isolated
    for flag, choices in (
        ("--mtp-loss-mask-mode", ("target", "path")),
        ("--mtp-loss-normalization", ("microbatch", "global")),
    ):
        assert tuple(actions[flag].choices) == choices
        assert all(f'"{choice}":' in actions[flag].help for choice in choices)


@pytest.mark.parametrize("flag", ["--mtp-loss-mask-mode", "--mtp-loss-normalization"])
def test_unknown_choices_are_refused_by_the_parser(parser, flag, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args([flag, "sometimes"])
    assert "invalid choice: 'sometimes'" in capsys.readouterr().err


def test_isolation_without_heads_is_refused_when_the_config_is_made(parser):
    with pytest.raises(ValueError, match="set mtp_num_layers or drop mtp_isolated_loss"):
        config_of(parser.parse_args(["--mtp-isolated-loss"]))
