"""Runs under launchers other than torchrun: in a group that exists."""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hstu.train
import sid_gr.train
from commons.trainer.config.load import load_config, load_config_file
from commons.trainer.ranks.collectives import limit_collectives
from commons.trainer.ranks.launch import initialize_ranks
from commons.trainer.ranks.rank_info import RankInfo
from tests.helpers.jobs.training_configs import TINY
from tests.helpers.models.sid_models import model_parallel
from tests.helpers.ranks.faults import error_of
from tests.helpers.ranks.on_ranks import on, on_two_ranks


def settings(run_dir, *flags):
    """The tiny job as a config file holds it."""
    arguments = [*TINY, "--trainer.run-dir", str(run_dir), "--trainer.enable-balanced-shuffler", *flags]
    return asdict(load_config(hstu.train.TrainConfig, arguments))


@pytest.mark.slow
@on_two_ranks
def test_a_group_that_exists_is_joined_and_stays(tmp_path):
    logging.basicConfig()  # as TorchRec's first warning would, in ranks that have had none
    handlers, found = list(logging.getLogger().handlers), []
    for name, device in (("a", "cpu" if torch.cuda.is_available() else "auto"), ("b", "cpu")):
        config = settings(tmp_path / name, "--trainer.device", device)
        summary = hstu.train.train(config)
        assert dist.is_initialized() and logging.getLogger().handlers == handlers
        found.append((summary.steps, summary.metrics["eval_rows"], summary.loss))
    assert found[0] == found[1] and found[0][:2] == (6, 16)


@on_two_ranks
def test_a_run_on_another_thread_saves_checkpoints(tmp_path):
    flags = ["--trainer.ckpt-save-interval", "3", "--trainer.ckpt-save-dir", str(tmp_path / "checkpoints")]
    results, config = [], settings(tmp_path, *flags)
    thread = threading.Thread(target=lambda: results.append(hstu.train.train(config).steps))
    thread.start()
    thread.join(280)
    dist.barrier()
    assert results == [6] and len(list((tmp_path / "checkpoints").iterdir())) == 2


@pytest.mark.slow
@on_two_ranks
def test_parallel_groups_end_with_their_run_and_others_are_kept(tmp_path):
    config = asdict(load_config_file(sid_gr.train.TrainConfig, "sid_gr/configs/random.toml"))
    config["trainer"] |= {"max_train_iters": 2, "max_eval_iters": 1, "eval_batch_size": 2, "train_batch_size": 4}
    config["trainer"] |= {"device": "cpu", "top_k_for_generation": 2, "eval_metrics": ("HR@2",)}
    for name in ("a", "b"):  # the second makes megatron-core's groups anew
        config["trainer"]["run_dir"] = str(tmp_path / name)
        assert sid_gr.train.train(config).steps == 2
    config["model"]["tensor_model_parallel_size"] = 2
    with model_parallel():
        said = "ValueError: tensor_model_parallel_size is 2, megatron-core's groups exist already, with 1 ranks"
        assert error_of(sid_gr.train.train, config).startswith(said)


@on("own_two_ranks", timeout=100)
def test_a_process_makes_one_group_after_another_at_the_same_address(tmp_path):
    """As a script that trains twice; rank 0, which hosts the store, is the last to leave, and once comes alone."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = torch.tensor(probe.getsockname()[1])
    dist.broadcast(port, src=0)
    rank = dist.get_rank()
    for number in range(3):
        dist.destroy_process_group()
        info, gave_up = RankInfo(rank, 2, rank, 2, f"localhost:{port}"), tmp_path / "gave up"
        if number == 1 and rank == 0:
            seconds = mock.patch.object(dist.distributed_c10d, "_get_default_timeout", lambda _: timedelta(seconds=1))
            with seconds, pytest.raises(dist.DistStoreError, match="complete"):
                initialize_ranks("cpu", ranks=info)
            gave_up.touch()
        while number == 1 and not gave_up.exists():
            time.sleep(0.01)
        initialize_ranks("cpu", ranks=info)
        limit_collectives(10.0)
        found = torch.tensor([rank, number])
        dist.all_reduce(found)
        assert found.tolist() == [1, 2 * number]
        time.sleep(0.5 * (rank == 0))


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"device_type": "cuda"}, "ValueError: device is 'cuda', the existing process group has cpu:gloo"),
        (
            {"ranks": RankInfo(2, 3, 0, 1, "localhost:1")},
            r"ValueError: ranks has rank 2 of 3, this process is rank \d of 2 of the existing process group, ",
        ),
    ],
)
@on_two_ranks
def test_what_is_asked_of_a_group_that_exists(options, answer):
    for ranks in (None, RankInfo(dist.get_rank(), 2, dist.get_rank(), 2, "localhost:1")):
        assert initialize_ranks(device_type="cpu", ranks=ranks) == torch.device("cpu")
    said = error_of(initialize_ranks, **{"device_type": "cpu"} | options)
    assert re.match(answer, said) and "\n" not in said, said
