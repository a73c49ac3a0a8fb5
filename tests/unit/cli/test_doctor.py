"""`evenrank doctor`: what is wrong is said with its remedy, and ends with status 1."""

from __future__ import annotations

import re
import sys
import types

import pytest
import torch

from commons.cli import doctor
from commons.cli.main import main
from commons.perf_model import partitioner


@pytest.fixture
def versions(monkeypatch):
    """Packages that are pretended to be installed; nothing is imported."""
    installed = {"torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0+cpu", "megatron-core": "0.16.1"}
    monkeypatch.setattr(doctor, "_version", installed.get)
    monkeypatch.setattr(doctor, "import_module", lambda name: None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(doctor, "driver_problem", lambda: None)
    pretend_core(monkeypatch, types.SimpleNamespace(PLANS=doctor.PLANS))
    return installed


def pretend_core(monkeypatch, core):
    """A native core, or None for none, wherever it would be found."""
    monkeypatch.setitem(sys.modules, "commons.perf_model.partitioner._native", core)
    monkeypatch.delattr(partitioner, "_native", raising=False)
    if core is not None:
        monkeypatch.setattr(partitioner, "_native", core, raising=False)


def told(capsys, status):
    """What was said, with single spaces."""
    assert main(["doctor"]) == status
    return " ".join(capsys.readouterr().out.split())


def test_all_is_well(versions, capsys):
    said = told(capsys, 0)
    for part in (
        "evenrank ok",
        "torch ok 2.13.0+cpu",
        "fbgemm ok fbgemm-gpu-cpu 1.8.0",
        "torchrec ok 1.8.0",
        "gloo yes",
    ):
        assert part in said
    assert "pip" not in said


@pytest.mark.parametrize(
    ("change", "status", "parts"),
    [
        ({"torchrec": None}, 1, ("torchrec wrong not installed", "--no-deps torchrec==1.8.*")),
        ({"fbgemm-gpu-cpu": None}, 1, ("fbgemm wrong not installed", "--no-deps fbgemm-gpu-cpu==1.8.*")),
        ({"fbgemm-gpu": "1.8.0"}, 1, ("fbgemm wrong", "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && pip install")),
        ({"torchrec": "1.7.0"}, 0, ("releases note", "torch 2.13 was not released with", "torchrec==1.8.*")),
        ({"megatron-core": None}, 0, ("megatron-core note not installed; SID-GR needs it", "pip install")),
    ],
)
def test_packages_that_do_not_fit(versions, capsys, change, status, parts):
    versions.update(change)
    said = told(capsys, status)
    assert all(part in said for part in parts), said


def test_a_library_that_cannot_be_loaded(versions, monkeypatch, capsys):
    def load(name):
        if name == "fbgemm_gpu":
            raise OSError("libcudart.so.12: cannot open shared object file\nmore")

    monkeypatch.setattr(doctor, "import_module", load)
    said = told(capsys, 1)
    assert "fbgemm wrong fbgemm-gpu-cpu 1.8.0+cpu, cannot be imported (libcudart.so.12: cannot open" in said
    assert "more" not in said and "--force-reinstall" in said


def test_a_driver_and_gpus(versions, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "driver_problem", lambda: "the NVIDIA driver serves CUDA 11.4; update it")
    assert "driver: the NVIDIA driver serves CUDA 11.4; update it" in told(capsys, 1)
    monkeypatch.setattr(doctor, "driver_problem", lambda: None)
    names = ["NVIDIA H200", "NVIDIA Unheard-of", "NVIDIA T4"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    monkeypatch.setattr(doctor, "device_problem", lambda device: "no code for it" if device.index == 2 else None)
    said = told(capsys, 1)
    assert "GPU 0 ok NVIDIA H200, 989 TFLOPS in bf16" in said
    assert "GPU 1 note NVIDIA Unheard-of, peak unknown" in said and "GPU 2: no code for it" in said


@pytest.mark.parametrize(
    ("core", "found"), [(None, "not built"), (types.SimpleNamespace(PLANS=1), "built for plans 1")]
)
def test_a_native_core_that_is_missing_or_old(versions, monkeypatch, capsys, core, found):
    pretend_core(monkeypatch, core)
    said = told(capsys, 0)
    assert re.search(rf"native core note {found}.*numpy", said) and "native core: " in said
