"""Under context parallelism over 2 and 4 ranks every gradient is that of one rank, in float64.

One torchrun launch per size computes all cases (`parity_worker.py`), and one more the same figures
for the release below the series, to show what is repaired. With MTP_REPORT_DIR set, the worst
figures per axis are written there as JSON and as a table.
"""

import itertools
import json
import os
from pathlib import Path

import pytest

from tests.support import has_gpu, launch
from tests.support.device import SHARE_GPU
from tests.support.release import derives_targets
from tests.support.unpatched import NoUnpatchedTree, faulty_tree, import_path

WORKER = Path(__file__).with_name("parity_worker.py")
TOLERANCE = 1e-12
AXES = ("family", "layout", "mask", "per_token", "depths", "repeated", "detached", "variant")
# layouts and modes; masks, GPTModel: depths and repeated, HybridModel: repeated; variants
CASES, CASES_WITHOUT_LABELS = 3 * 2 * (4 * (3 * 2 + 2) + 4), 3 * 2


@pytest.fixture(scope="module", params=[2, 4], ids=["cp2", "cp4"])
def parity(request) -> list[dict]:
    """Every case at one context-parallel size against one rank."""
    records = launch(WORKER, request.param, ["whole"], timeout=400)
    _write_report(f"cp{request.param}", records)
    return records


@pytest.fixture(scope="module")
def upstream(tmp_path_factory) -> list[dict]:
    """GPTModel, two distinct depths, at CP=2 on the release below the series."""
    try:
        tree = faulty_tree(tmp_path_factory.mktemp("unpatched"))
    except NoUnpatchedTree as reason:
        pytest.skip(str(reason))
    records = launch(WORKER, 2, ["upstream"], timeout=300, env={"PYTHONPATH": import_path(tree)})
    _write_report("upstream-cp2", records)
    return records


def test_every_gradient_of_mtp_is_that_of_one_rank(parity):
    assert len(parity) == CASES - (0 if derives_targets() else CASES_WITHOUT_LABELS)
    assert [r for r in parity if not r["mtp_error"] <= TOLERANCE] == []


def test_every_gradient_outside_mtp_is_that_of_one_rank(parity):
    """With the main loss on and, where a case does not detach the heads, the objective's part."""
    assert [r for r in parity if not r["rest_error"] <= TOLERANCE] == []


def test_the_grid_compares_gradients_that_are_there(parity):
    """A case without a target has exactly zero gradients; any other a gradient everywhere."""
    for record in parity:
        empty = record["mask"] == "empty"
        assert (record["mtp_largest"] == 0.0) == (not any(record["total"][1]))
        assert (record["rest_largest"] == 0.0) == empty
        assert record["mask"] == "one-hot" or (record["mtp_smallest"] > 0.0) != empty
    for axis, values in _axes(parity).items():
        for value in set(values) - {"empty"}:
            assert any(r["mtp_largest"] > 1e-3 for r in parity if r[axis] == value), (axis, value)


@pytest.mark.skipif(not has_gpu(), reason="needs a GPU that two ranks can share")
def test_two_ranks_on_one_gpu_give_the_gradients_of_one_rank(monkeypatch):
    for name, value in SHARE_GPU.items():
        monkeypatch.setenv(name, value)
    records = launch(WORKER, 2, ["packed"], timeout=120)
    _write_report("one-gpu-cp2", records)
    assert [r for r in records if not max(r["mtp_error"], r["rest_error"]) <= TOLERANCE] == []
    assert len(records) == 16


def test_logged_losses_and_acceptance_counts_are_those_of_one_rank(parity):
    for record in parity:
        got, wanted = record["loss"]
        assert got == pytest.approx(wanted, rel=1e-5, abs=0)  # upstream's tracker is float32
        assert record["correct"][0] == record["correct"][1]
        assert record["total"][0] == record["total"][1]
    assert any(any(record["correct"][1]) for record in parity)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "thd-padded", "thd-unpadded"])
def test_upstream_trains_masked_mtp_wrongly_in_the_same_cases(upstream, layout, per_token):
    """What the rest of this file would find without the series."""
    [record] = [
        r
        for r in upstream
        if (r["layout"], r["per_token"], r["mask"]) == (layout, per_token, "prompt")
    ]
    assert record["mtp_error"] > 0.05


def test_gradients_of_the_main_loss_agree_in_upstream_too(upstream):
    """So the comparison itself is sound: with detached heads they come from the main loss alone."""
    assert [r for r in upstream if not r["rest_error"] <= TOLERANCE] == []
    assert all(r["rest_largest"] > 1e-3 for r in upstream if r["mask"] != "empty")


def _axes(records: list[dict]) -> dict[str, list]:
    """The values that every axis of the grid takes."""
    return {axis: sorted({record[axis] for record in records}) for axis in AXES}


def _write_report(name: str, records: list[dict]) -> None:
    """Leave the worst relative differences, overall and per axis, for a report."""
    if "MTP_REPORT_DIR" not in os.environ:
        return
    directory = Path(os.environ["MTP_REPORT_DIR"])
    directory.mkdir(parents=True, exist_ok=True)
    rows = [("all", "", *_worst(records))]
    for axis, values in _axes(records).items():
        rows += [(axis, v, *_worst([r for r in records if r[axis] == v])) for v in values]
    for layout, mask in itertools.product(*(_axes(records)[axis] for axis in ("layout", "mask"))):
        chosen = [r for r in records if (r["layout"], r["mask"]) == (layout, mask)]
        rows.append(("layout, mask", f"{layout}, {mask}", *_worst(chosen)))
    content = dict(worst=[dict(zip(("axis", "value", "mtp", "rest"), row)) for row in rows])
    (directory / f"parity-{name}.json").write_text(json.dumps(content | dict(cases=records)))
    lines = [f"{'axis':<14}{'value':<24}{'MTP':>10}{'others':>10}"]
    for axis, value, mtp, rest in rows:
        lines.append(f"{axis:<14}{value!s:<24}{mtp:>10.1e}{rest:>10.1e}")
    (directory / f"parity-{name}.txt").write_text("\n".join(lines) + "\n")


def _worst(records: list[dict]) -> tuple[float, float]:
    return max(r["mtp_error"] for r in records), max(r["rest_error"] for r in records)
