"""Processes as ranks: numbers, signals and exit statuses; a GPU that does not work, before groups are made."""

import functools
import os
import signal
import socket
import subprocess
import threading
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
from torch.utils.data import DataLoader

from commons.releases import RELEASES
from commons.trainer.ranks import cuda_check, errors, launch
from commons.trainer.ranks.cuda_check import device_problem, driver_problem
from commons.trainer.ranks.rank_info import RankInfo
from commons.trainer.ranks.stop import keep_workers
from commons.trainer.torchrun import _exit_status, torchrun

ONE = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, address="localhost:29500")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 1}, "rank is 1, world_size is 1; "),
        ({"local_rank": -1}, "local_rank is -1, local_world_size is 1; "),
        ({"local_world_size": 2}, "rank 0 of 1 is number 0 of 2 on its machine; a machine cannot have more ranks"),
        ({"world_size": 2, "local_rank": 1, "local_world_size": 2}, "rank 0 of 2 is number 1 of 2 on its machine; "),
        ({"address": "localhost"}, "address is 'localhost'; it is `host:port`, .*: give rank 0's host"),
        ({"address": "localhost:http"}, "address is 'localhost:http'; "),
        ({"address": "localhost:99999"}, "address is 'localhost:99999'; "),
        ({"address": ":29500"}, "address is ':29500'; "),
    ],
)
def test_numbers_of_ranks_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RankInfo(**(vars(ONE) | changes))


def test_libraries_find_the_variables_that_torchrun_sets(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    ranks = RankInfo(rank=5, world_size=7, local_rank=1, local_world_size=2, address="[::1]:29500", gpu=None)
    ranks.set_environment()
    assert os.environ["MASTER_ADDR"] == "::1" and os.environ["LOCAL_WORLD_SIZE"] == "2"
    assert RankInfo.of_torchrun() == RankInfo(5, 7, 1, 2, "::1:29500")


def make_file(worker):
    Path(f"worker{worker}").touch()
    start_thread()


def start_thread():
    """A signal to the process reaches any thread that does not block it."""
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def test_workers_outlive_the_signal_of_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    is_over = threading.Event()
    os.register_at_fork(after_in_child=lambda: is_over.is_set() or start_thread())  # as OpenTelemetry does
    loader = DataLoader(list(range(40)), batch_size=None, num_workers=2, worker_init_fn=make_file)
    keep_workers(loader)
    keep_workers(loader)
    batches = iter(loader)
    assert [next(batches), next(batches)] == [0, 1]  # one of each worker
    workers = [worker.pid for worker in batches._workers]
    subprocess.run(["kill", "-TERM", *map(str, workers)], check=True)  # sent by another process than the parent
    assert list(batches) == list(range(2, 40))
    is_over.set()  # a hook cannot be removed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker0", "worker1"]


def test_spawned_workers_outlive_the_signal_from_their_start_on():
    loader = DataLoader(list(range(4)), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    keep_workers(loader)
    batches = iter(loader)  # the worker imports for a while before its worker_init_fn
    subprocess.run(["kill", "-TERM", str(batches._workers[0].pid)], check=True)
    assert list(batches) == [0, 1, 2, 3]


def test_other_processes_of_the_program_end_by_the_signal():
    """A fork server that started with the signal blocked would pass that on to a multiprocessing.Pool."""
    loader = DataLoader([0, 1], batch_size=None, num_workers=1, multiprocessing_context="forkserver")
    keep_workers(loader)
    assert list(loader) == [0, 1]
    other = get_context("forkserver").Process(target=time.sleep, args=(60,))
    other.start()
    other.terminate()
    other.join(10)
    status = other.exitcode
    other.kill()
    assert status == -signal.SIGTERM


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_end_when_their_rank_says_so(method):
    loader = DataLoader(
        list(range(40)), batch_size=None, num_workers=1, persistent_workers=True, multiprocessing_context=method
    )
    keep_workers(loader)
    batches = iter(loader)
    assert next(batches) == 0
    worker = batches._workers[0]
    worker.terminate()
    worker.join(5)
    status = worker.exitcode
    worker.kill()
    assert status == (-signal.SIGTERM if method == "forkserver" else 0)


def failed(*exits):
    """Ranks that ended in this order, each (rank, status); a negative status is a signal."""
    failures = {}
    for when, (rank, status) in enumerate(exits):
        failure = ProcessFailure(local_rank=rank, pid=1, exitcode=status, error_file="/nowhere")
        failure.timestamp = when
        failures[rank] = failure
    return ChildFailedError("program", failures)


@pytest.mark.parametrize(
    ("exits", "status", "said"),
    [
        ([(1, 2), (0, -15)], 2, ""),  # torchrun ends the peers of a failed rank
        ([(1, -15), (0, 1)], 143, "error: rank 1 was ended by SIGTERM\n"),  # and here somebody else ended one
        ([(0, 1), (1, -9), (2, -15)], 137, "error: rank 1 was ended by SIGKILL\n"),
        ([(0, 1)], 1, ""),
    ],
)
def test_exit_status(exits, status, said, capsys):
    assert _exit_status(failed(*exits)) == status
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RendezvousTimeoutError(), "RendezvousTimeoutError"),
        (RendezvousConnectionError("the store has ended"), "RendezvousConnectionError: the store has ended"),
    ],
)
def test_a_rendezvous_that_fails_is_one_line(error, reason, monkeypatch, capsys):
    monkeypatch.setattr(torch.distributed.run, "main", raising(error))
    assert torchrun([]) == 1
    said = f"error: the hosts' rendezvous failed ({reason}): look at the host of --rdzv-endpoint\n"
    assert capsys.readouterr().err == said


GPU = torch.device("cuda", 0)
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by downloading "
    "and installing a new version"
)
FAILED = "Unexpected error from cudaGetDeviceCount()"
NO_KERNEL = "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be ..."


def raising(error):
    def run(*_args, **_kwargs):
        raise error

    return run


@pytest.fixture
def old_driver(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", raising(RuntimeError(TOO_OLD)))


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of compute capability 7.0 on which everything runs."""
    for name, answer in {
        "is_available": True,
        "device_count": 1,
        "get_device_capability": (7, 0),
        "get_device_name": "Tesla V100",
        "get_arch_list": ["sm_80", "sm_90"],
        "synchronize": None,
        "set_device": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    for name in ("_run_torch", "_run_fbgemm"):
        monkeypatch.setattr(cuda_check, name, lambda device: None)


@pytest.fixture
def address(monkeypatch):
    """The address of a store that outlasts attempts, as that of torchrun's agent, and whose ranks make no group."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # restored after the test
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    yield f"localhost:{store.port}"  # the store serves as long as this frame is there


@pytest.fixture
def start(monkeypatch, address):
    """Start the only rank, which makes no process group."""
    monkeypatch.setattr(dist, "init_process_group", raising(AssertionError("a process group was made")))
    return functools.partial(launch.initialize_ranks, ranks=RankInfo(0, 1, 0, 1, address))


def test_a_driver_that_is_too_old(old_driver, monkeypatch):
    problem = driver_problem()
    assert problem.startswith("the NVIDIA driver supports CUDA 12.4, torch ") and "is built for CUDA 13.0, " in problem
    assert problem.endswith("or choose device 'cpu'") and "\n" not in problem
    # Builds that the driver serves, of releases that belong together: fbgemm's on the package index need CUDA 13 too.
    torch_release = ".".join(torch.__version__.split(".")[:2])
    pair = f'"torch=={torch_release}.*" "fbgemm-gpu=={RELEASES[torch_release]}.*"'
    assert "which needs driver 580; " in problem
    assert f"pip install --force-reinstall {pair} --index-url https://download.pytorch.org/whl/cu126" in problem
    # One that no build runs with.
    monkeypatch.setattr(torch.cuda, "init", raising(RuntimeError(TOO_OLD.replace("12040", "11040"))))
    assert "supports CUDA 11.4" in driver_problem() and "pip" not in driver_problem()


def test_no_driver_is_no_problem(monkeypatch, old_driver):
    forked = "Cannot re-initialize CUDA in forked subprocess."
    for said in "Found no NVIDIA driver on your system.", "No CUDA GPUs are available", forked:
        monkeypatch.setattr(torch.cuda, "init", raising(RuntimeError(said)))
        assert driver_problem() is None
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "init", raising(AssertionError("not asked")))
    assert driver_problem() is None


def test_a_gpu_that_has_failed(monkeypatch, old_driver):
    """Its ranks would train on the CPU, or wait for those with GPUs."""
    monkeypatch.setattr(torch.cuda, "init", raising(RuntimeError(f"{FAILED}.\n Error 802: not initialized")))
    problem = driver_problem()
    assert problem.startswith(f"torch cannot use this machine's GPUs: {FAILED}. Error 802: not initialized; ")
    assert problem.endswith("or choose device 'cpu'")


@pytest.mark.parametrize(
    ("operation", "error", "text"),
    [
        ("_run_torch", RuntimeError(NO_KERNEL), r"has no code for it; .* only for its build targets \(sm_80, sm_90\)"),
        ("_run_fbgemm", RuntimeError(NO_KERNEL), "fbgemm-gpu.* has no code for it; .*install a build of fbgemm for"),
        ("_run_fbgemm", NotImplementedError("Could not run"), "fbgemm-gpu.* is a build without CUDA; "),
    ],
)
def test_a_gpu_without_code(monkeypatch, gpu, operation, error, text):
    assert driver_problem() is None and device_problem(GPU) is None
    monkeypatch.setattr(cuda_check, operation, raising(error))
    problem = device_problem(GPU)
    assert problem.startswith("Tesla V100 has compute capability 7.0, and ") and "\n" not in problem
    with pytest.raises(ValueError, match=text):
        raise ValueError(problem)


def test_other_errors_stay_what_they_are(monkeypatch, gpu):
    monkeypatch.setattr(cuda_check, "_run_torch", raising(RuntimeError("CUDA out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        device_problem(GPU)


@pytest.mark.parametrize("device_type", ["auto", "cuda", "cpu"])
def test_ranks_with_an_old_driver_start_only_on_the_cpu(old_driver, start, device_type):
    with pytest.raises((ValueError, AssertionError)) as caught:
        start(device_type)
    reason = "a process group was made" if device_type == "cpu" else "the NVIDIA driver supports CUDA 12.4"
    assert str(caught.value).startswith(reason)


def test_ranks_on_a_gpu_without_code_do_not_start(monkeypatch, gpu, start):
    monkeypatch.setattr(cuda_check, "_run_fbgemm", raising(RuntimeError(NO_KERNEL)))
    with pytest.raises(ValueError, match="Tesla V100 has compute capability 7.0"):
        start()


def test_the_first_rank_that_fails_in_an_attempt_reports_it(monkeypatch):
    """Although torchrun's store has the claim of another rank in an earlier attempt, whose message was printed."""
    store, reports = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False), []
    of_torchrun = {"MASTER_ADDR": "localhost", "MASTER_PORT": store.port, "WORLD_SIZE": 2}
    of_torchrun |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RUN_ID": "job"}
    for attempt, rank in (0, 0), (0, 1), (1, 1), (1, 0):
        for name, value in (of_torchrun | {"TORCHELASTIC_RESTART_COUNT": attempt, "RANK": rank}).items():
            monkeypatch.setenv(name, str(value))
        reports.append(errors._claim_report())
    assert reports == [True, False, True, False]


def test_an_attempt_finds_no_address_of_the_attempt_before(monkeypatch):
    """Although both are in torchrun's store: with a static rendezvous on two hosts, no restart succeeded."""
    host, made = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False), []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: made.append(options["store"]))
    of_torchrun = {"MASTER_ADDR": "localhost", "MASTER_PORT": host.port, "RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
    of_torchrun |= {"LOCAL_WORLD_SIZE": 1, "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RUN_ID": "job"}
    for attempt in 0, 1:
        for name, value in (of_torchrun | {"TORCHELASTIC_RESTART_COUNT": attempt}).items():
            monkeypatch.setenv(name, str(value))
        launch.initialize_ranks("cpu")
    made[0].set("address", "of a rank that has ended")
    assert made[0].check(["address"]) and not made[1].check(["address"])


@pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl")  # of a build without CUDA
def test_ranks_take_gpus_on_all_machines_or_on_none(monkeypatch, gpu, address):
    made = []
    monkeypatch.setattr(launch, "_join", lambda store, *_: store)  # it would wait for the other rank
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: made.append((backend, options)))
    first = RankInfo(rank=0, world_size=2, local_rank=0, local_world_size=1, address=address, gpu=0)
    second = replace(first, rank=1)
    for ranks in first, second:
        assert launch.initialize_ranks(ranks=ranks) == GPU
        backend, options = made.pop()
        assert (backend, options["device_id"], options["rank"], options["world_size"]) == ("nccl", GPU, ranks.rank, 2)
    without = f"device is 'auto', rank 1 \\(on {socket.gethostname()}\\) has the CPU, rank 0 has a GPU; all ranks need "
    with pytest.raises(ValueError, match=without):
        launch.initialize_ranks(ranks=replace(second, gpu=1))
    # In a next attempt rank 0 is on a machine that has lost its GPU, then one without; the store still has its former.
    assert launch.initialize_ranks(ranks=replace(first, gpu=1)).type == "cpu" and made.pop()[1]["device_id"] is None
    with pytest.raises(ValueError, match="rank 1 .* has a GPU, rank 0 has the CPU; "):
        launch.initialize_ranks("cuda", ranks=second)
    assert launch.initialize_ranks("cpu", ranks=second).type == "cpu" and made.pop()[0] == "gloo" and not made
    with pytest.raises(ValueError, match="device is 'cuda', this machine has 1 GPUs for 4 ranks; "):
        launch.initialize_ranks("cuda", ranks=RankInfo(3, 4, 3, 4, address))
