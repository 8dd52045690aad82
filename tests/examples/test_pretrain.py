"""Megatron's own trainer with MTP heads, started by torchrun, and the launch scripts' arguments.

The runs are those of ``examples/pretrain`` with a tiny model; `pretrain_worker.py` records them.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import (
    has_gpu,
    has_transformer_engine,
    is_mtp_param,
    launch,
    prepare,
    standin,
)

prepare()

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("pretrain_worker.py")
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
    " --max-position-embeddings 32 --position-embedding-type rope --transformer-impl local"
    " --attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights"
    " --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion"
    " --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion"
)
RUN = (
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-3 --min-lr 1e-3"
    " --lr-decay-style constant --clip-grad 1.0 --log-interval 2 --eval-iters 0"
    " --eval-interval 1000"
    " --mock-data --split 100,0,0 --tokenizer-type NullTokenizer --vocab-size 127"
    " --distributed-backend gloo --calculate-per-token-loss --mtp-num-layers 2"
)
NUMBER = r"(\d\.\d+E[+-]\d+)"


class Run:
    """What every rank of one launch left."""

    def __init__(self, directory: Path, ranks: int):
        self.ranks = [
            torch.load(directory / f"rank-{rank}.pt", weights_only=True) for rank in range(ranks)
        ]
        self.directory = directory

    @property
    def printed(self) -> str:
        """Of the last rank, which prints the trainer's log."""
        return self.ranks[-1]["printed"]

    @property
    def wandb(self) -> dict:
        """(step, name) to value."""
        return {(step, name): value for step, name, value in self.ranks[-1]["wandb"]}

    def logged(self, pattern: str) -> list[tuple]:
        """All matches in the log."""
        return re.findall(pattern, self.printed)

    def losses(self) -> list[list[float]]:
        """[lm, depth 1, depth 2] of each interval, as upstream's log line has them."""
        line = r"iteration +[24]/.*" + " \\| ".join(
            f"{name} loss: {NUMBER}" for name in ("lm", "mtp_1", "mtp_2")
        )
        return [[float(value) for value in match] for match in self.logged(line)]

    def policy(self) -> dict[str, torch.Tensor]:
        """Parameters outside MTP, of rank 0."""
        parameters = self.ranks[0]["parameters"].items()
        return {name: value for name, value in parameters if not is_mtp_param(name)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Launch each distinct run once."""

    @functools.cache
    def start(ranks: int, flags: str) -> Run:
        directory = tmp_path_factory.mktemp("run")
        writers = f"--tensorboard-dir {directory}/tensorboard --wandb-project test"
        writers += f" --wandb-exp-name mtp --wandb-save-dir {directory}"
        writers += f" --data-cache-path {directory}/cache"
        every = f"{MODEL} {RUN} {writers} {flags}".split()
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        launch(WORKER, ranks, [directory, *every], timeout=180, env=env)
        return Run(directory, ranks)

    return start


ISOLATED = "--mtp-isolated-loss"
CP2 = "--context-parallel-size 2"


def test_the_log_has_each_depths_loss_and_the_accepted_length(run):
    one = run(1, ISOLATED)
    ours = one.logged(
        rf"MTP heads at iteration +(\d+) \| depth 1 loss: {NUMBER}, acceptance: [\d.]+%, "
        rf"targets: (\d+) \| depth 2 loss: {NUMBER}, acceptance: [\d.]+%, targets: (\d+)"
        r" \| accepted length: (\d\.\d+)"
    )
    # 2 iterations of 4 rows of 32 labels; depth k has no target for the last k positions
    assert [(match[0], match[2], match[4]) for match in ours] == [
        ("2", "248", "240"),
        ("4", "248", "240"),
    ]
    upstreams = one.losses()
    assert len(upstreams) == 2
    for match, (_, first, second) in zip(ours, upstreams):
        assert [float(match[1]), float(match[3])] == pytest.approx([first, second], rel=1e-6)
        assert 1.0 <= float(match[5]) <= 3.0
    assert upstreams[1][1] < upstreams[0][1] and upstreams[1][2] < upstreams[0][2]  # it learns


def test_metrics_reach_the_wandb_writer(run):
    one = run(1, ISOLATED)
    for step in (2, 4):
        for depth in (1, 2):
            assert one.wandb[step, f"mtp_{depth} loss"] > 0
            assert one.wandb[step, f"mtp_{depth}_loss"] > 0
            assert (step, f"mtp_{depth}_acceptance_rate") in one.wandb
            assert 0 <= one.wandb[step, f"mtp_{depth}_acceptance"] <= 1
        assert 1 <= one.wandb[step, "mtp_accepted_length"] <= 3
    assert one.wandb[2, "mtp_1_supervised_tokens"] == 248


def test_metrics_reach_the_tensorboard_writer(run):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    one = run(1, ISOLATED)
    events = accumulator.EventAccumulator(str(one.directory / "tensorboard")).Reload()
    for name in ("mtp_1 loss", "mtp_2 loss", "mtp_2_acceptance_rate"):
        assert [event.step for event in events.Scalars(name)] == [1, 2, 3, 4]
    for name in ("mtp_1_loss", "mtp_2_acceptance", "mtp_accepted_length"):
        written = {event.step: event.value for event in events.Scalars(name)}
        assert written == pytest.approx({step: one.wandb[step, name] for step in (2, 4)})


@pytest.mark.parametrize("flags", [ISOLATED, f"{CP2} {ISOLATED}"], ids=["dp2", "cp2"])
def test_two_ranks_train_as_one(run, flags):
    one, two = run(1, ISOLATED), run(2, flags)
    for got, want in zip(two.losses(), one.losses(), strict=True):
        assert got == pytest.approx(want, rel=1e-5)
    for name, value in two.policy().items():
        torch.testing.assert_close(value, one.policy()[name], rtol=0, atol=2e-4)


def test_isolated_heads_leave_the_policy_bit_for_bit_as_without_them(run):
    """With clipping active: gradient norms are above 1.

    Both runs give the heads a norm of their own. Without the flag their zeros would count in the
    policy's: the same number, but added up in another order on some CPUs.
    """
    isolated, off = run(1, ISOLATED), run(1, f"{ISOLATED} --mtp-loss-scaling-factor 0")
    assert off.losses() == [] and isolated.losses()
    changed = [n for n, v in off.policy().items() if not torch.equal(v, isolated.policy()[n])]
    assert changed == []
    assert all(float(norm) > 1 for norm in isolated.logged(r"grad norm: ([\d.]+)"))


def test_without_isolation_the_heads_train_the_policy_too(run):
    joint, isolated = run(2, CP2), run(2, f"{CP2} {ISOLATED}")
    decoder = [n for n in joint.policy() if n.startswith("decoder.layers")]
    assert all(not torch.equal(joint.policy()[n], isolated.policy()[n]) for n in decoder)


def test_a_run_resumed_from_its_checkpoint_continues_bit_for_bit(run, tmp_path):
    """Two data-parallel ranks, distributed optimizer, attention dropout in policy and heads.

    Not hidden dropout: without a GPU it shares its generator with the data loader, which draws from
    it once more when a run resumes.
    """
    common = f"{ISOLATED} --attention-dropout 0.1 --use-distributed-optimizer --ckpt-format torch_dist"
    common += f" --dist-ckpt-optim-fully-reshardable --save-interval 2 --save {tmp_path}/saved"
    straight = run(2, common)
    resumed = run(2, f"{common} --load {tmp_path}/saved --ckpt-step 2")
    first = "iteration        1/"
    assert first in straight.printed and first not in resumed.printed
    for got, want in zip(resumed.ranks, straight.ranks, strict=True):
        got, want = got["parameters"], want["parameters"]
        assert [name for name in want if not torch.equal(got[name], want[name])] == []


# The launch scripts


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Stand-ins for torchrun and Slurm: `cluster(script, *flags)` is what torchrun got."""
    fakes = {
        "torchrun": f'printf "%s\\n" "$@" > {tmp_path}/arguments',
        "srun": 'shift; exec "$@"',
        "scontrol": "echo node7; echo node8",
    }
    for name, body in fakes.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = dict(SLURM_SUBMIT_DIR=str(ROOT), SLURM_JOB_NODELIST="node[7-8]", SLURM_NNODES="2")
    env = {**os.environ, **slurm, "SLURM_JOB_ID": "42", "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def start(script: str, *flags: str, **variables: str) -> list[str]:
        path = ROOT / "examples" / "pretrain" / script
        env.update(variables, OUTPUT=str(tmp_path / "output"))
        subprocess.run(["bash", path, *flags], env=env, check=True)
        return (tmp_path / "arguments").read_text().splitlines()

    return start


def configured(monkeypatch, flags: list[str], world_size: int):
    """The trainer's configuration for these flags, without starting it."""
    if not has_gpu():
        standin.install_training()
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_args, validate_args

    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Transformer Engine brings this fusion; where it is missing, only that flag cannot be checked.
    without = [] if has_transformer_engine() else ["--no-rope-fusion"]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags, *without])
    args = validate_args(parse_args())
    args.padded_vocab_size = args.padded_vocab_size or args.vocab_size
    return args, pretrain_cfg_container_from_args(args, gpt_config_from_args(args))


@pytest.mark.parametrize("script, nodes", [("torchrun.sh", 1), ("slurm.sbatch", 2)])
def test_a_launch_scripts_arguments_are_valid(cluster, monkeypatch, script, nodes):
    arguments = cluster(script, "--train-iters", "50")
    entry = arguments.index(str(ROOT / "examples" / "pretrain" / "pretrain_gpt.py"))
    launcher, flags = arguments[:entry], arguments[entry + 1 :]
    assert launcher[-2:] == ["--nproc-per-node", "8"]
    if nodes == 1:
        assert "--standalone" in launcher
    else:
        assert launcher[launcher.index("--rdzv-endpoint") + 1] == "node7:29500"
        assert launcher[launcher.index("--nnodes") + 1] == "2"
    args, config = configured(monkeypatch, flags, 8 * nodes)
    transformer = config.model.transformer
    assert transformer.mtp_num_layers == 2 and transformer.mtp_isolated_loss
    assert transformer.mtp_loss_normalization == "global" and transformer.calculate_per_token_loss
    assert args.data_parallel_size == 2 * nodes
    assert args.train_iters == 50  # flags of the command line come last


def test_a_corpus_takes_the_place_of_mock_data(cluster, monkeypatch):
    arguments = cluster("torchrun.sh", DATA="/data/text_document", TOKENIZER="org/model")
    assert "--mock-data" not in arguments
    assert arguments[arguments.index("--data-path") + 1] == "/data/text_document"
    assert arguments[arguments.index("--tokenizer-model") + 1] == "org/model"
