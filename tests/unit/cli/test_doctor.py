"""`evenrank doctor`: what is wrong is said with its remedy, and ends with status 1."""

import importlib
import re
import sys
import types

import pytest
import torch

from commons.cli import doctor
from commons.trainer.ranks import cuda_check
from tests.helpers.jobs.programs import run_program

CORE = types.SimpleNamespace(SOURCES="0123456789ab", COMPILER="g++")


@pytest.fixture
def versions(monkeypatch):
    """Packages that are pretended to be installed; nothing is imported."""
    installed = {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0+cpu", "megatron-core": "0.16.1"}
    installed |= {"numpy": "2.4.6", "pyyaml": "6.0.3", "pyarrow": "26.0.1"}
    needs = {
        "evenrank": ["torch<2.15,>=2.11", "numpy>=2.0", "PyYAML>=6", 'tomli>=2; python_version < "3.11"', "pyarrow"]
    }
    needs["torchrec"] = ["fbgemm-gpu", "tensordict", "torchmetrics==1.0.3", "pyre-extensions"]
    monkeypatch.setattr(doctor, "installed", lambda name: installed.get(name.lower()))
    monkeypatch.setattr(doctor.metadata, "requires", needs.get)
    load(monkeypatch, {})
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(cuda_check, "driver_problem", lambda: None)
    monkeypatch.setattr(doctor, "_driver_version", lambda: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    return installed


def load(monkeypatch, errors):
    """Let packages be imported, or fail with these errors, by the name of the module; our own are what they are."""

    def import_module(name):
        if name in errors:
            raise errors[name]
        if name == doctor._CORE:
            return CORE
        return importlib.import_module(name) if name.startswith("commons.") else torch

    monkeypatch.setattr(doctor, "import_module", import_module)


@pytest.fixture
def said(told):
    """What the doctor says, with single spaces."""
    return lambda status: " ".join(told("doctor", status=status).split())


def test_all_is_well(versions, said):
    text = said(0)
    for part in ("evenrank ok", "torch ok 2.13.0+cpu", "fbgemm ok fbgemm-gpu-cpu 1.8.0", "torchrec ok", "gloo yes"):
        assert part in text
    assert "pip" not in text


def of_torch(number, release):
    return {"torch": number, "torchrec": release, "fbgemm-gpu-cpu": release}


@pytest.mark.parametrize(
    ("change", "status", "parts"),
    [
        ({"torch": None}, 1, ("torch wrong not installed", 'pip install "torch==2.13.*"', "torchrec note 1.8.0; not")),
        ({"numpy": None, "pyarrow": None}, 1, ("dependencies wrong not installed: numpy, pyarrow", '>=2.0" "pyarrow"')),
        ({"numpy": "1.26.4"}, 0, ("numpy note 1.26.4; evenrank requires numpy>=2.0", 'pip install "numpy>=2.0"')),
        ({"torchrec": None}, 1, ("torchrec wrong not installed", '--no-deps "torchrec==1.8.*"')),
        ({"fbgemm-gpu-cpu": None}, 1, ("fbgemm wrong not installed", '--no-deps "fbgemm-gpu-cpu==1.8.*"')),
        ({"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"}, 0, ("fbgemm ok fbgemm-gpu 1.8.0",)),
        ({"fbgemm-gpu": "1.8.0"}, 1, ("fbgemm wrong", "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && pip install")),
        ({"torchrec": "1.7.0"}, 0, ("releases note", "torch 2.13 does not fit", '"torchrec==1.8.*"')),
        ({"torchmetrics": "1.9.0"}, 0, ("note 1.9.0; torchrec requires torchmetrics==1.0.3", "pip install")),
        ({"megatron-core": None}, 0, ("megatron-core note not installed; SID-GR needs it", "pip install")),
        (of_torch("2.11.0", "1.6.1"), 0, ("torch ok 2.11.0",)),
        (of_torch("2.12.0", "1.8.0"), 0, ("torch 2.12 does not fit torchrec and fbgemm", '"torchrec==1.7')),
        (of_torch("2.14.1", "1.9.2"), 0, ("torch ok 2.14.1",)),
        (of_torch("2.14.1", "1.8.0"), 0, ("torch 2.14 does not fit torchrec and fbgemm", '"torchrec==1.9')),
        (of_torch("2.15.0", "1.9.2"), 0, ("note 2.15.0, built without CUDA; evenrank supports 2.11", '"torch==2.13')),
        (of_torch("2.10.0", "1.5.0"), 0, ("torch note 2.10.0", '"torchrec==1.8.*"')),
    ],
)
def test_packages_and_whether_they_fit(versions, monkeypatch, said, change, status, parts):
    versions.update(change)
    monkeypatch.setattr(torch, "__version__", versions["torch"] or "")
    text = said(status)
    assert all(part in text for part in parts), text
    assert ("pip" in text) == (len(parts) > 1)


LIBRARY = "libcudart.so.12: cannot open shared object file"


@pytest.mark.parametrize(
    ("module", "error", "parts"),
    [
        ("fbgemm_gpu", OSError(f"{LIBRARY}\nmore"), (f"fbgemm-gpu-cpu 1.8.0+cpu, cannot be imported ({LIBRARY}",)),
        ("torch", OSError(f"{LIBRARY}\nmore"), (f"torch wrong 2.13.0, cannot be imported ({LIBRARY})", "driver ok")),
        ("torch", ValueError(), ("torch wrong 2.13.0, cannot be imported (ValueError)",)),
        ("pyarrow", ImportError("libarrow.so"), ("pyarrow wrong 26.0.1, cannot be imported (libarrow.so)",)),
    ],
)
def test_a_library_that_cannot_be_loaded(versions, monkeypatch, said, module, error, parts):
    load(monkeypatch, {module: error})
    text = said(1)
    assert all(part in text for part in parts), text
    assert "more" not in text and "--force-reinstall" in text


def test_what_a_package_needs_itself(versions, monkeypatch, said):
    load(monkeypatch, {"torchrec": ModuleNotFoundError("No module named 'torchmetrics.aggregation'")})
    assert 'torchrec: pip install "tensordict" "torchmetrics==1.0.3" "pyre-extensions"' in said(1)
    versions.update({"tensordict": "0.15", "torchmetrics": "1.0.3"})
    load(monkeypatch, {"torchrec": ModuleNotFoundError("No module named 'pyre_extensions'")})
    assert 'torchrec: pip install "pyre-extensions"' in said(1)
    load(monkeypatch, {"torchrec": ModuleNotFoundError("No module named 'some_thing'")})
    versions["pyre-extensions"] = "0.0.32"
    assert "torchrec: pip install some-thing" in said(1)
    versions["numpy"] = None
    load(monkeypatch, {"torchrec": ModuleNotFoundError("No module named 'numpy'")})
    assert "torchrec note 1.8.0; not checked, because numpy cannot be imported" in said(1)
    versions.update({"numpy": "2.4.6", "fbgemm-gpu-cpu": None})
    load(monkeypatch, {"torchrec": ModuleNotFoundError("No module named 'fbgemm_gpu'")})
    assert "torchrec note 1.8.0; not checked, because fbgemm_gpu cannot be imported" in said(1)
    versions["fbgemm-gpu-cpu"] = "1.8.0"
    load(monkeypatch, {"torchrec": ModuleNotFoundError("No module named 'torchrec.types'")})
    assert 'torchrec: pip install --force-reinstall --no-deps "torchrec==1.8.*"' in said(1)


# Modules that nobody can import.
WITHOUT = """
import sys

class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nowhere())
from commons.cli.main import main
assert not {"torch", "numpy", "rich"} & set(sys.modules)
sys.exit(main(["doctor"]))
"""


@pytest.mark.parametrize(
    "missing",
    [pytest.param(["numpy", "pyarrow", "torchrec"], marks=pytest.mark.slow), ["torch", "numpy", "rich", "tyro"]],
)
def test_it_runs_without(missing, tmp_path):
    done = run_program(sys.executable, "-c", WITHOUT, *missing, cwd=tmp_path)
    said = " ".join(done.stdout.split())
    assert (done.returncode, done.stderr) == (1, ""), done
    for name in missing:
        assert re.search(rf"{name} wrong [\w.+]+, cannot be imported", said), said
        assert f"{name}: pip install --force-reinstall" in said


def test_a_driver_and_gpus(versions, monkeypatch, said):
    for problem in "the NVIDIA driver supports CUDA 11.4; update it", "torch cannot use the GPUs":
        monkeypatch.setattr(cuda_check, "driver_problem", lambda problem=problem: problem)
        text = said(1)
        assert "driver wrong no NVIDIA driver; torch cannot use the GPUs" in text and f"driver: {problem}" in text
    monkeypatch.setattr(cuda_check, "driver_problem", lambda: None)
    monkeypatch.setattr(doctor, "_driver_version", lambda: "580.65.06")
    names = ["NVIDIA H200", "NVIDIA Unheard-of", "NVIDIA T4"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    monkeypatch.setattr(cuda_check, "device_problem", lambda device: "no code for it" if device.index == 2 else None)
    text = said(1)
    assert "driver ok NVIDIA 580.65.06, serves CUDA" in text
    assert "GPU 0 ok NVIDIA H200, 989 TFLOPS in bf16" in text
    assert "GPU 1 note NVIDIA Unheard-of, peak unknown" in text and "GPU 2: no code for it" in text


OLD_DRIVER = 'pip install --force-reinstall "torch==2.13.*" "fbgemm-gpu==1.8.*" --index-url https://download.pytorch.org/whl/cu126'


def test_a_driver_that_serves_cuda_12_alone(versions, monkeypatch, said):
    """Before torch is installed, with its CPU build, and with one for CUDA 12."""
    monkeypatch.setattr(doctor, "_driver_version", lambda: "550.54.14")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert f"driver: update the driver, or {OLD_DRIVER}, or train on the CPU" in said(0)
    load(monkeypatch, {"torch": ImportError("none")})
    text = said(1)
    assert "driver note NVIDIA 550.54.14; builds for CUDA 13 need 580" in text
    assert f"driver: update the driver, or {OLD_DRIVER}" in text
    load(monkeypatch, {})
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    versions["fbgemm-gpu-cpu"] = None
    assert '--no-deps "fbgemm-gpu==1.8.*" --index-url https://download.pytorch.org/whl/cu126' in said(1)


def test_fbgemm_s_build_is_that_of_the_machine(versions, monkeypatch, said):
    """The CUDA build cannot be loaded without a driver, whose library it needs: its own remedy would be no remedy."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    versions.update({"fbgemm-gpu-cpu": None})
    assert 'pip install --force-reinstall --no-deps "fbgemm-gpu-cpu==1.8.*"' in said(1)
    versions.update({"fbgemm-gpu": "1.8.0"})
    load(monkeypatch, {"fbgemm_gpu": OSError("libnvidia-ml.so.1")})
    assert 'pip uninstall -y fbgemm-gpu && pip install --force-reinstall --no-deps "fbgemm-gpu-cpu==1.8.*"' in said(1)
    monkeypatch.setattr(doctor, "_driver_version", lambda: "580.65.06")
    assert 'fbgemm: pip install --force-reinstall --no-deps "fbgemm-gpu==1.8.*"' in said(1)


def test_gpus_that_torch_does_not_see(versions, monkeypatch, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_driver_version", lambda: "580.65.06")
    text = said(0)
    assert "driver note NVIDIA 580.65.06, and torch is built without CUDA" in text
    assert "driver: install the CUDA builds of torch" in text  # the driver is new enough for them
    for version, name in (
        ("driver of unknown version", "NVIDIA driver of unknown version"),
        (None, "no NVIDIA driver"),
    ):
        monkeypatch.setattr(doctor, "_driver_version", lambda version=version: version)
        monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
        assert f"driver note {name}, and torch is built without CUDA" in said(0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    text = said(0)
    assert "torch sees no GPU" in text and "CUDA_VISIBLE_DEVICES may hide them" in text


def test_the_version_of_the_driver(tmp_path, monkeypatch):
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12\n"
    for text, version in (
        (line, "580.65.06"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.12  Wed Sep 20\n", "535.104.12"),
        ("?", "driver of unknown version"),
        (None, None),
    ):
        path = tmp_path / "version"
        path.unlink(missing_ok=True) if text is None else path.write_text(text)
        monkeypatch.setattr(doctor, "_KERNEL_MODULE", path)
        assert doctor._driver_version() == version


def test_a_native_core_that_is_missing_or_lacks_what_it_needs(versions, monkeypatch, said):
    missing = ImportError("the native core /x.so is missing; evenrank plans with it: install it again")
    load(monkeypatch, {doctor._CORE: missing})
    text = said(1)
    assert "native core wrong the native core /x.so is missing; evenrank plans with it" in text
    assert "native core: install it again" in text
    load(monkeypatch, {doctor._CORE: ModuleNotFoundError("No module named 'numpy'")})
    assert "native core note not checked (No module named 'numpy')" in said(0)
