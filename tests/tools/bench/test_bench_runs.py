"""The command as a whole, at tiny sizes: both trees, every section, every file.

Run: pytest tests/tools/bench/test_bench_runs.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools.bench import trees

from tests.support import run_ranks

ROOT = Path(__file__).resolve().parents[3]


def bench(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "tools.bench", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Folder and what the command said."""
    folder = tmp_path_factory.mktemp("bench")
    done = bench("--quick", "--repeats", 1, "--strict", "--output", folder)
    assert (folder / "summary.json").exists(), done.stdout[-2000:] + done.stderr[-4000:]
    return folder, done


def _rows(folder):
    return json.loads((folder / "summary.json").read_text())["rows"]


def _section(folder, start):
    found = [row for row in _rows(folder) if row["section"].startswith(start)]
    assert found, start
    return found


@pytest.mark.slow
class TestQuickRun:
    """`python -m tools.bench --quick --strict`."""

    def test_every_section_has_rows_with_what_the_report_needs(self, measured):
        starts = "messages", "host", "gradients", "objective time", "objective peak", "training"
        starts = (*starts, "objective time over the width", "ceilings", "operators", "growth")
        for start in starts:
            for row in _section(measured[0], start):
                assert {"name", "upstream", "ours", "ratio", "goal", "met"} <= row.keys()

    def test_one_message_per_microbatch_whatever_sequences_and_depths(self, measured):
        calls = [r for r in _section(measured[0], "messages") if r["key"]["what"] == "calls"]
        assert {row["ours"] for row in calls} == {1}
        # upstream: a message pair per sequence, depth and field (ids, positions, labels, mask)
        for row in calls:
            assert row["upstream"] == 8 * row["key"]["sequences"] * row["key"]["D"]

    def test_the_host_never_waits_and_upstream_does_for_every_sequence(self, measured):
        rows = _section(measured[0], "host")
        assert all(row["ours"] == 0 and row["key"]["places"] == {} for row in rows)
        assert all(row["upstream"] >= row["key"]["sequences"] * row["key"]["D"] for row in rows)

    def test_gradients_meet_their_goals(self, measured):
        assert all(row["met"] for row in _section(measured[0], "gradients"))

    def test_the_plain_path_does_upstreams_floating_point_work_and_chunks_less(self, measured):
        flops = {
            row["key"]["mode"]: row
            for row in _section(measured[0], "training")
            if row["key"]["what"] == "FLOPs over off"
        }
        assert flops["on"]["ours"] == flops["on"]["upstream"] > 1
        assert 1 < flops["isolated"]["ours"] < flops["isolated"]["upstream"]

    def test_plots_are_drawn(self, measured):
        for name in ("objective", "width", "messages", "step"):
            assert (measured[0] / f"{name}.png").stat().st_size > 10_000

    def test_strict_ends_with_1_exactly_when_a_goal_is_missed(self, measured):
        folder, done = measured
        missed = [row for row in _rows(folder) if row["met"] is False]
        assert done.returncode == (1 if missed else 0)
        for row in missed:
            assert f"not met: {row['section']}: {row['name']}" in done.stdout


@pytest.mark.slow
def test_half_precision_runs_too(tmp_path):
    sections = "objective", "step", "roofline"
    done = bench(
        "--quick", "--repeats", 1, "--dtype", "bfloat16", "--output", tmp_path, "--only", *sections
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert {row["section"].split()[0] for row in _rows(tmp_path)} >= {"objective", "training"}
    machine = json.loads((tmp_path / "summary.json").read_text())["machine"]
    assert machine["sections"] == list(sections)


def test_without_a_gpu_cuda_is_refused_before_anything_is_measured(tmp_path):
    done = bench("--device", "cuda", "--output", tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "needs a GPU" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("width", ["0", "-16", "100", "wide"])
def test_a_width_that_no_head_has_is_refused_with_what_to_give(width):
    done = bench("--quick", f"--hidden={width}")
    assert done.returncode == 2
    assert f"expected a multiple of 16 like 128, got '{width}'" in done.stderr


@pytest.mark.parametrize("option", ["--repeats", "--threads"])
@pytest.mark.parametrize("number", ["0", "-1", "few"])
def test_fewer_than_one_repeat_or_thread_is_refused(option, number):
    done = bench("--quick", f"{option}={number}")
    assert done.returncode == 2
    assert f"expected a number from 1, got '{number}'" in done.stderr


def test_a_folder_that_cannot_be_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("kept")
    done = bench("--quick", "--output", tmp_path / "file" / "bench")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --output: ") and len(done.stderr.splitlines()) == 1


def test_docs_without_figures_are_refused_in_one_line(tmp_path):
    done = bench("--docs", "--output", tmp_path / "none")
    assert done.returncode == 2
    assert done.stderr == f"error: no figures in {tmp_path}/none: measure first, without --docs\n"


def test_docs_from_some_sections_would_lose_the_others(tmp_path):
    machine = dict(quick=False, sections=["width"])
    (tmp_path / "summary.json").write_text(json.dumps(dict(machine=machine, rows=[])))
    done = bench("--docs", "--output", tmp_path)
    assert done.returncode == 2
    assert "lacks figures (accuracy, objective, roofline, step, teacher, traffic)" in done.stderr


def _modules_of_both_trees(upstream):
    pair = trees.load_pair(upstream)
    name = "megatron.core.transformer.multi_token_prediction"
    mine, theirs = (tree.load(name) for tree in (pair.ours, pair.upstream))
    assert hasattr(mine, "roll_packed") and not hasattr(theirs, "roll_packed")
    assert Path(theirs.__file__).is_relative_to(pair.upstream.path)
    import megatron.core
    from megatron.core.transformer import multi_token_prediction as outside

    assert Path(megatron.core.__file__).is_relative_to(pair.ours.path)
    assert outside is mine


def _imports_inside_a_block(upstream):
    pair, path = trees.load_pair(upstream), list(sys.path)
    with pair.upstream.active():
        from megatron.core.transformer import multi_token_prediction as found

        with pytest.raises(RuntimeError, match="'ours' inside the block of 'upstream'"):
            with pair.ours.active():
                pass
        with pair.upstream.active():
            pass
        with pytest.raises(ModuleNotFoundError):
            import megatron.core.transformer.mtp_objective.shift  # noqa: F401
    assert Path(found.__file__).is_relative_to(pair.upstream.path)
    assert sys.path == path


class TestTrees:
    """Two releases in one process: a forked one, for a second Megatron leaves traces in torch."""

    @pytest.fixture(scope="class")
    def upstream(self, tmp_path_factory):
        return trees.unpack_upstream(tmp_path_factory.mktemp("upstream"))

    def test_each_tree_has_its_own_modules_and_the_process_keeps_ours(self, upstream):
        run_ranks(_modules_of_both_trees, 1, upstream)

    def test_imports_inside_a_trees_block_are_that_trees(self, upstream):
        run_ranks(_imports_inside_a_block, 1, upstream)
