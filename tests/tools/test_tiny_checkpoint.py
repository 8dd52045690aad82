"""Tiny checkpoints are complete, load with transformers, and are the same twice."""

import itertools
import json
import resource
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors import safe_open

from tools.tiny_checkpoint import make
from tools.tiny_checkpoint.__main__ import main
from tools.tiny_checkpoint.families import FAMILIES
from tools.tiny_checkpoint.tokens import SPECIAL_TOKENS

KINDS = [
    (family, layout, dtype)
    for family, shape in FAMILIES.items()
    for layout, dtype in itertools.product(shape.layouts, ("bf16", "fp32"))
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A function from a kind to its directory, made once."""
    root = tmp_path_factory.mktemp("tiny")

    def directory(family="qwen3_5_moe", layout="per-expert", dtype="bf16"):
        out = root / f"{family}-{layout}-{dtype}"
        if not out.exists():
            make(out, family=family, layout=layout, dtype=dtype)
        return out

    return directory


def _tensors(directory):
    """{key: (file, tensor)} over all shards."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {key: (path.name, file.get_tensor(key)) for key in file.keys()}
    return found


def _head_keys(keys):
    return [key for key in keys if key.startswith(("mtp.", "model.layers.2.", "model.mtp_layers."))]


@pytest.mark.parametrize("family, layout, dtype", KINDS)
def test_index_shards_and_dtype_agree_and_the_head_lies_in_two_shards(made, family, layout, dtype):
    directory = made(family, layout, dtype)
    tensors = _tensors(directory)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {key: file for key, (file, _) in tensors.items()}
    sizes = [tensor.nbytes for _, tensor in tensors.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    wanted = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    assert {tensor.dtype for _, tensor in tensors.values()} == {wanted}
    assert json.loads((directory / "config.json").read_text())["dtype"] in str(wanted)
    assert len({tensors[key][0] for key in _head_keys(tensors)}) == 2


def test_the_number_of_head_keys_is_that_of_the_real_checkpoints(made):
    """785 and 19 with 256 experts: 17 and the experts' three each, or two."""
    for layout, count in (("per-expert", 17 + 3 * 8), ("packed", 17 + 2)):
        assert len(_head_keys(_tensors(made("qwen3_5_moe", layout)))) == count
    assert 17 + 3 * 256 == 785
    assert len(_head_keys(_tensors(made("qwen3_5", "dense")))) == 15


def test_both_layouts_hold_the_same_model(made):
    one, packed = (_tensors(made(layout=layout)) for layout in ("per-expert", "packed"))
    for key in ("mtp.layers.0.mlp.experts", "model.language_model.layers.1.mlp.experts"):
        gate, up = (
            torch.stack([one[f"{key}.{e}.{name}_proj.weight"][1] for e in range(8)])
            for name in ("gate", "up")
        )
        assert torch.equal(packed[f"{key}.gate_up_proj"][1], torch.cat([gate, up], dim=1))
    shared = set(one) & set(packed)
    assert len(shared) > 60
    assert all(torch.equal(one[key][1], packed[key][1]) for key in shared)
    configs = [(made(layout=x) / "config.json").read_text() for x in ("per-expert", "packed")]
    assert configs[0] == configs[1]  # nothing but the keys tells the layout


@pytest.mark.parametrize(
    "family, layout", [k[:2] for k in KINDS if "qwen" in k[0] and k[2] == "bf16"]
)
@pytest.mark.parametrize("auto", ["AutoModelForCausalLM", "AutoModelForImageTextToText"])
def test_transformers_loads_every_tensor_of_the_target(made, family, layout, auto):
    model, info = getattr(transformers, auto).from_pretrained(
        made(family, layout), output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    ids = torch.arange(20)[None]
    logits = model(input_ids=ids).logits
    assert logits.shape == (1, 20, 768) and logits.isfinite().all()


def test_norm_weights_tell_w_from_one_plus_w_and_matrices_keep_the_scale(made):
    for family, layout, centre in (
        ("qwen3_5_moe", "packed", 0.0),
        ("deepseek_v3", "per-expert", 1.0),
        ("mimo", "dense", 1.0),
    ):
        tensors = _tensors(made(family, layout, "fp32"))
        norms = torch.cat([tensors[k][1] for k in _head_keys(tensors) if "norm.weight" in k])
        assert abs(norms.mean() - centre) < 0.1 and 0.2 < norms.std() < 0.4
        matrices = [tensors[k][1] for k in _head_keys(tensors) if "proj" in k and "bias" not in k]
        scales = [m.std().item() * m.shape[-1] ** 0.5 for m in matrices]
        assert 0.8 < min(scales) and max(scales) < 1.2


def test_the_tokenizer_round_trips_text_and_has_a_chat_template(made):
    tokenizer = transformers.AutoTokenizer.from_pretrained(made())
    text = 'def f(x):\n    return "ünïcode" + x'
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 768
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    prompt = tokenizer.apply_chat_template(
        messages[:1], add_generation_prompt=True, return_dict=False
    )
    assert ids[: len(prompt)] == prompt
    assert tokenizer.decode(ids[len(prompt) :]) == "Hello<|im_end|>\n"
    assert tokenizer.convert_ids_to_tokens(list(range(len(SPECIAL_TOKENS)))) == list(SPECIAL_TOKENS)


def test_the_same_arguments_give_the_same_bytes_and_a_seed_another_head(made, tmp_path):
    make(tmp_path / "again")
    make(tmp_path / "other", seed=1)
    first = made()
    for file in first.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    key = "mtp.fc.weight"
    assert not torch.equal(_tensors(tmp_path / "other")[key][1], _tensors(first)[key][1])


def test_copies_of_the_targets_tensors_are_copies(made):
    tensors = _tensors(made("deepseek_v3", "per-expert"))
    for copy, original in (
        ("model.layers.2.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.2.shared_head.head.weight", "lm_head.weight"),
    ):
        assert torch.equal(tensors[copy][1], tensors[original][1])


def test_a_trained_target_predicts_the_manual_better_than_chance(tmp_path, made):
    make(tmp_path / "trained", train_steps=30)
    tokenizer = transformers.AutoTokenizer.from_pretrained(made())
    text = "The statement is executed. An expression is evaluated, and the result is returned. "
    ids = torch.tensor([tokenizer(text * 4)["input_ids"]])
    losses = []
    for directory in (made(), tmp_path / "trained"):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        losses.append(model(input_ids=ids, labels=ids).loss.item())
    assert losses[1] < losses[0] - 0.5
    # Training changes the target alone.
    head = [_tensors(d)["mtp.fc.weight"][1] for d in (made(), tmp_path / "trained")]
    assert torch.equal(*head)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(family="gpt2"), "family: expected one of qwen3_5_moe"),
        (dict(family="qwen3_5", layout="packed"), "layout: qwen3_5 has dense"),
        (dict(dtype="fp16"), "dtype: expected one of bf16, fp32"),
        (dict(hidden=60), "hidden: expected a positive multiple of 8"),
        (dict(experts=3), "experts: expected an even number"),
        (dict(family="mimo", train_steps=1), "train_steps: expected 0"),
        (dict(vocab=100), "vocab: expected at least 263"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.split(":")[0],
)
def test_arguments_that_cannot_work_are_refused_and_nothing_is_left(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path / "out", **arguments)
    assert not list(tmp_path.iterdir())


def test_an_existing_directory_is_left_alone(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    assert main(["--out", str(tmp_path / "out")]) == 2
    assert "exists" in capsys.readouterr().err
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.parametrize("room", [500, 20_000, 100_000], ids=["text", "tokenizer", "shards"])
def test_a_full_disk_is_an_error_in_words_and_leaves_nothing(tmp_path, capsys, room):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))  # the kernel refuses longer files
    try:
        status = main(["--out", str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert status == 2
    assert said == (
        f"error: {tmp_path / 'out'} cannot be written: File too large. Nothing has been written"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_command_makes_what_its_options_say(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["--out", str(out), "--layout", "packed", "--experts", "4", "--hidden", "32"]) == 0
    assert str(out) in capsys.readouterr().out
    text = json.loads((out / "config.json").read_text())["text_config"]
    assert (text["num_experts"], text["hidden_size"]) == (4, 32)
    assert _tensors(out)["mtp.layers.0.mlp.experts.gate_up_proj"][1].shape == (4, 96, 32)


def test_help_names_the_options_without_importing_torch():
    code = """
import sys
from tools.tiny_checkpoint.__main__ import main
try:
    main(["--help"])
finally:
    assert "torch" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "--train-steps" in result.stdout
