"""Tests of forked ranks, worlds and torchrun launches.

Run: ``pytest tests/support/test_ranks.py``.
"""

import importlib
import multiprocessing
import os
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from tests.support import device, has_gpu, launch, parallel_world, prepare, ranks, run_ranks

prepare()


def _rank_and_sum(offset: int):
    with parallel_world(cp=int(os.environ["WORLD_SIZE"])) as groups:
        total = torch.tensor(
            [float(groups.cp.rank() + offset)], device=device(), requires_grad=True
        )
        (total * 2).sum().backward()
        summed = total.detach().clone()
        dist.all_reduce(summed, group=groups.cp)
        return {"rank": groups.cp.rank(), "sum": summed}


def _fail_on_rank_one():
    with parallel_world(cp=2) as groups:
        if groups.cp.rank() == 1:
            raise KeyError("the cause")
        dist.barrier()


def _sleep_on_rank_one():
    with parallel_world(cp=2) as groups:
        if groups.cp.rank() == 1:
            time.sleep(600)
        dist.barrier()


def _die_on_rank_one():
    if os.environ["RANK"] == "1":
        os._exit(3)


def _skip():
    pytest.skip("not on this machine")


_kept: list = []


def _drop_what_the_test_process_kept():
    _kept.clear()
    with parallel_world(cp=2) as groups:
        return groups.cp.size()


def test_ranks_share_too_few_gpus_only_when_told(monkeypatch):
    places = importlib.import_module("tests.support.device")  # the package exports its function
    monkeypatch.setattr(places, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("MTP_TEST_SHARE_GPU", raising=False)
    assert (places.environment_for(2), places.backend()) == (places.HIDE_GPUS, "nccl")
    monkeypatch.setenv("MTP_TEST_SHARE_GPU", "1")
    assert (places.environment_for(2), places.backend()) == ({}, "gloo")


class TestRanks:
    """Ranks started from the test process."""

    def test_results_come_in_rank_order(self):
        results = run_ranks(_rank_and_sum, 3, 10)
        assert [result["rank"] for result in results] == [0, 1, 2]
        assert [result["sum"].item() for result in results] == [33.0] * 3

    @pytest.mark.skipif(has_gpu(), reason="with a GPU every test here starts ranks this way")
    def test_ranks_start_from_a_clean_server_as_they_do_beside_a_gpu(self, monkeypatch):
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(["tests.support.hybrid_spec"])
        monkeypatch.setattr(ranks, "_start_method", lambda: (server, 60.0))
        results = run_ranks(_rank_and_sum, 2, 10)
        assert [result["sum"].item() for result in results] == [21.0] * 2

    def test_ranks_start_after_a_backward_and_a_world_of_the_test_process(self):
        with parallel_world():
            weight = torch.ones(64, 64, device=device(), requires_grad=True)
            (weight @ weight).sum().backward()
        assert not dist.is_initialized()
        assert len(run_ranks(_rank_and_sum, 2, 0)) == 2

    def test_groups_kept_beyond_their_world_do_not_hang_ranks_that_drop_them(self):
        with parallel_world() as groups:
            _kept.append(groups)
        del groups
        assert run_ranks(_drop_what_the_test_process_kept, 2, timeout=30) == [2, 2]
        _kept.clear()

    def test_a_failing_rank_ends_the_case_with_its_traceback(self):
        start = time.monotonic()
        with pytest.raises(AssertionError) as failed:
            run_ranks(_fail_on_rank_one, 2, timeout=60)
        message = str(failed.value)
        assert "KeyError: 'the cause'" in message and "in _fail_on_rank_one" in message
        assert message.index("rank 1 raised") < message.find("rank 0") or "rank 0" not in message
        assert time.monotonic() - start < 50

    def test_a_hanging_rank_ends_at_the_timeout_with_the_stack_of_every_rank(self):
        start = time.monotonic()
        with pytest.raises(AssertionError) as failed:
            run_ranks(_sleep_on_rank_one, 2, timeout=4)
        message = str(failed.value)
        assert "rank 0 did not end within 4 s" in message and "in barrier" in message
        assert "rank 1 did not end within 4 s" in message
        assert message.count("in _sleep_on_rank_one") == 2
        assert has_gpu() or time.monotonic() - start < 20

    def test_a_rank_that_dies_without_a_word_is_named(self):
        with pytest.raises(AssertionError, match="rank 1 died with exit code 3"):
            run_ranks(_die_on_rank_one, 2)

    def test_a_skip_in_a_rank_skips_the_test(self):
        with pytest.raises(pytest.skip.Exception, match="not on this machine"):
            run_ranks(_skip, 2)

    def test_functions_that_other_processes_cannot_import_are_refused(self):
        with pytest.raises(ValueError, match="module-level function"):
            run_ranks(lambda: None, 2)

    def test_starting_ranks_inside_a_world_is_refused(self):
        with parallel_world(), pytest.raises(RuntimeError, match="holds a process group"):
            run_ranks(_skip, 2)

    def test_a_world_inside_a_world_is_refused(self):
        with parallel_world(), pytest.raises(RuntimeError, match="already holds"):
            with parallel_world():
                pass


class TestTorchrun:
    """Launches as users make them."""

    @staticmethod
    def _script(tmp_path, body: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(body))
        return str(path)

    def test_the_result_of_rank_zero_comes_back(self, tmp_path):
        script = self._script(
            tmp_path,
            """
            import torch, torch.distributed as dist
            from tests.support import device, parallel_world
            from tests.support.worker import main

            def total(start):
                with parallel_world(cp=2) as groups:
                    rank = torch.tensor(float(start) + groups.cp.rank(), device=device())
                    dist.all_reduce(rank)
                with parallel_world(tp=2):
                    return rank.item()

            if __name__ == "__main__":
                main(total)
            """,
        )
        assert launch(script, 2, [10]) == 21.0

    def test_a_failing_rank_ends_the_launch_with_its_traceback(self, tmp_path):
        script = self._script(
            tmp_path,
            """
            import os, time

            def fail():
                raise KeyError("the cause")

            fail() if os.environ["RANK"] == "1" else time.sleep(600)
            """,
        )
        with pytest.raises(AssertionError) as failed:
            launch(script, 2, timeout=100)
        assert "rank 1 raised" in str(failed.value) and "in fail" in str(failed.value)
        assert "KeyError: 'the cause'" in str(failed.value)

    def test_a_hanging_launch_ends_at_the_timeout_with_the_stack_of_every_rank(self, tmp_path):
        script = self._script(
            tmp_path,
            """
            import time

            def wait_forever():
                time.sleep(600)

            wait_forever()
            """,
        )
        start = time.monotonic()
        with pytest.raises(AssertionError) as failed:
            launch(script, 2, timeout=12)
        message = str(failed.value)
        assert "rank 0 did not end within 12 s" in message and "rank 1 did" in message
        assert message.count("in wait_forever") == 2
        assert time.monotonic() - start < 40
