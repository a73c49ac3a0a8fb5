"""Runs under launchers other than torchrun: in a group that exists."""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist

import hstu.train
import sid_gr.train
from commons.trainer.config.load import load_config, load_config_file
from commons.trainer.ranks.launch import initialize_ranks
from commons.trainer.ranks.rank_info import RankInfo
from tests.helpers.jobs.training_configs import TINY
from tests.helpers.models.sid_models import model_parallel
from tests.helpers.ranks.faults import raised_by


def settings(run_dir, *flags):
    """The tiny job as a config file holds it."""
    arguments = [*TINY, "--trainer.run-dir", str(run_dir), "--trainer.enable-balanced-shuffler", *flags]
    return asdict(load_config(hstu.train.TrainConfig, arguments))


def _train(config):
    logging.basicConfig()  # as TorchRec's first warning would, in ranks that have had none
    handlers = list(logging.getLogger().handlers)
    summary = hstu.train.train(config)
    assert dist.is_initialized() and logging.getLogger().handlers == handlers
    return summary.steps, summary.loss, summary.metrics["eval_rows"]


def test_a_group_that_exists_is_joined_and_stays(two_ranks, tmp_path):
    config = settings(tmp_path / "a")
    config["trainer"]["device"] = "auto" if not torch.cuda.is_available() else "cpu"
    first = two_ranks.run(_train, config)
    again = two_ranks.run(_train, settings(tmp_path / "b"))
    assert first == again and first[0][0] == 6 and first[0][2] == 16


def _train_on_a_thread(config):
    results = []
    thread = threading.Thread(target=lambda: results.append(hstu.train.train(config).steps))
    thread.start()
    thread.join(280)
    return results


def test_a_run_on_another_thread_saves_checkpoints(two_ranks, tmp_path):
    flags = ["--trainer.ckpt-save-interval", "3", "--trainer.ckpt-save-dir", str(tmp_path / "checkpoints")]
    assert two_ranks.run(_train_on_a_thread, settings(tmp_path, *flags)) == [[6], [6]]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def _train_sid(run_dir):
    config = asdict(load_config_file(sid_gr.train.TrainConfig, "sid_gr/configs/random.toml"))
    config["trainer"] |= {"max_train_iters": 2, "max_eval_iters": 1, "eval_batch_size": 2, "train_batch_size": 4}
    config["trainer"] |= {"device": "cpu", "top_k_for_generation": 2, "eval_metrics": ("HR@2",)}
    steps = []
    for name in ("a", "b"):  # the second makes megatron-core's groups anew
        config["trainer"]["run_dir"] = f"{run_dir}/{name}"
        steps.append(sid_gr.train.train(config).steps)
    config["model"]["tensor_model_parallel_size"] = 2
    with model_parallel():
        return steps, raised_by(lambda: sid_gr.train.train(config))


@pytest.mark.slow
def test_parallel_groups_end_with_their_run_and_others_are_kept(two_ranks, tmp_path):
    for steps, error in two_ranks.run(_train_sid, str(tmp_path)):
        assert steps == [2, 2]
        assert error.startswith(
            "ValueError: tensor_model_parallel_size is 2, megatron-core's groups exist already, with 1 ranks"
        )


def _join(**options):
    devices = []
    return raised_by(lambda: devices.append(initialize_ranks(**options))), devices


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"device_type": "cpu"}, "no error"),
        ({"device_type": "cuda"}, "ValueError: device is 'cuda', the existing process group has cpu:gloo"),
        (
            {"ranks": RankInfo(2, 3, 0, 1, "localhost:1")},
            "ValueError: ranks has rank 2 of 3, this process is rank 0 of 2 of the existing process group, ",
        ),
    ],
)
def test_what_is_asked_of_a_group_that_exists(two_ranks, options, answer):
    (said, devices), _ = two_ranks.run(_join, **{"device_type": "cpu"} | options)
    assert said.startswith(answer) and "\n" not in said
    assert devices == [torch.device("cpu")] * (said == "no error")
