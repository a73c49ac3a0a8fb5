"""The packages that `evenrank doctor` looks at: whether they are there, can be imported and fit together.

A package that is missing or broken is a finding, never an error: nothing here imports one but to see whether it can be.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import warnings
from collections.abc import Iterator
from importlib import import_module, metadata
from typing import Any

from commons.cli.findings import NOTE, OK, WRONG, Finding

# torch, torchrec and fbgemm are released together (the table is fbgemm_gpu/__init__.py's); those evenrank runs with.
_RELEASES = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8"}
_OLDEST_TORCH, _NEWEST_TORCH = "2.11", "2.13"
_NEWEST = _RELEASES[_NEWEST_TORCH]
_MEGATRON = 'pip install "megatron-core>=0.16,<0.17"'
_FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-nightly")
# Modules that are not called like their package.
_MODULES = {"pyyaml": "yaml", "scikit-learn": "sklearn"}
# A broken torch breaks these in many ways.
_OF_TORCH = ("fbgemm", "torchrec", "megatron-core")


class Packages:
    """Looks at packages, one after another, and knows which of them are missing when others need them.

    Attributes:
        torch: the module; None before it was looked at, and where it cannot be imported.
    """

    def __init__(self) -> None:
        self.torch: Any = None
        self._absent: set[str] = set()

    def look(self) -> Iterator[Finding]:
        """At all of them, in the order in which they depend on each other."""
        yield self._torch()
        yield from self._dependencies()
        yield from self._fbgemm_and_torchrec()
        version = installed("megatron-core")
        if version is None:
            yield Finding("megatron-core", NOTE, "not installed; SID-GR needs it", _MEGATRON)
        else:
            yield self._imported("megatron-core", "megatron.core", version, _MEGATRON)

    def _torch(self) -> Finding:
        mended = f'pip install "torch=={_NEWEST_TORCH}.*"'
        version = installed("torch")
        if version is None:
            self._absent.add("torch")
            return Finding("torch", WRONG, "not installed", mended)
        remedy = f'pip install --force-reinstall "torch=={_minor(version)}.*"'
        finding = self._imported("torch", "torch", version, remedy)
        if finding.state != OK:
            return finding
        self.torch = import_module("torch")
        cuda = self.torch.version.cuda
        found = f"{self.torch.__version__}, built {'without CUDA' if cuda is None else f'for CUDA {cuda}'}"
        if _minor(self.torch.__version__) in _RELEASES:
            return Finding("torch", OK, found)
        found += f"; evenrank is made for {_OLDEST_TORCH} to {_NEWEST_TORCH}"
        return Finding("torch", NOTE, found, f"{mended}, and then what is named below")

    def _dependencies(self) -> Iterator[Finding]:
        """All other packages that evenrank needs: whether they are there, new enough, and can be imported."""
        needed = [need for need in _requirements("evenrank") if need[0] != "torch"]
        if not needed:
            found = "not known: evenrank is not installed, this is a folder of it"
            yield Finding("dependencies", NOTE, found, "in that folder: pip install --no-deps -e .")
            return
        missing = {name: requirement for name, requirement in needed if installed(name) is None}
        if missing:
            self._absent |= {_module(name) for name in missing}
            quoted = " ".join(f'"{requirement}"' for requirement in missing.values())
            names = ", ".join(_name(requirement) for requirement in missing.values())
            yield Finding("dependencies", WRONG, f"not installed: {names}", f"pip install {quoted}")
        else:
            yield Finding("dependencies", OK, f"{len(needed)} installed")
        for name, requirement in needed:
            version = installed(name)
            if version is None:
                continue
            remedy = f'pip install --force-reinstall --no-deps "{requirement}"'
            finding = self._imported(name, _module(name), version, remedy)
            if finding.state != OK:
                yield finding
            elif not _satisfies(version, requirement):
                yield Finding(name, NOTE, f"{version}; evenrank asks for {requirement}", f'pip install "{requirement}"')

    def _fbgemm_and_torchrec(self) -> Iterator[Finding]:
        """Whether both are there, can be imported, and are of the torch that is installed."""
        of_torch = _NEWEST_TORCH if self.torch is None else _minor(self.torch.__version__)
        wanted = _RELEASES.get(of_torch, _NEWEST)
        has_cuda = shutil.which("nvidia-smi") if self.torch is None else self.torch.version.cuda
        build = "fbgemm-gpu-cpu" if has_cuda is None else "fbgemm-gpu"
        builds = [name for name in _FBGEMM if installed(name) is not None]
        found = ", ".join(f"{name} {installed(name)}" for name in builds) or "not installed"
        mended = f'pip install --force-reinstall --no-deps "{build}=={wanted}.*"'
        if any(name != build for name in builds):  # they share one folder
            mended = f"pip uninstall -y {' '.join(builds)} && {mended}"
        if len(builds) == 1:
            yield self._imported("fbgemm", "fbgemm_gpu", found, mended)
        else:
            yield Finding("fbgemm", WRONG, found, mended)
        version = installed("torchrec")
        mended = f'pip install --force-reinstall --no-deps "torchrec=={wanted}.*"'
        if version is None:
            yield Finding("torchrec", WRONG, "not installed", mended)
            return
        yield self._imported("torchrec", "torchrec", version, mended)
        for name, requirement in _requirements("torchrec"):
            other = installed(name)
            if other is not None and not _satisfies(other, requirement):
                yield Finding(name, NOTE, f"{other}; torchrec asks for {requirement}", f'pip install "{requirement}"')
        releases = {_minor(str(installed(name))) for name in ("torchrec", *builds)}
        if releases != {wanted}:
            yield Finding(
                "releases",
                NOTE,
                f"torch {of_torch} was not released with torchrec and fbgemm {' and '.join(sorted(releases))}",
                f'pip install --no-deps "torchrec=={wanted}.*" "{build}=={wanted}.*"',
            )

    def _imported(self, name: str, module: str, found: str, remedy: str) -> Finding:
        """Whether a module can be imported: a build for another torch fails only then."""
        if "torch" in self._absent and name in _OF_TORCH:
            return Finding(name, NOTE, f"{found}; not looked into without torch")
        problem = _import_problem(module)
        if problem is None:
            return Finding(name, OK, found)
        missing = re.search(r"No module named '(\w+)", problem)
        needed = missing[1] if missing else module.split(".")[0]
        if needed in self._absent:
            return Finding(name, NOTE, f"{found}; not looked into without {needed}")
        self._absent.add(module.split(".")[0])
        if needed != module.split(".")[0]:
            remedy = f"pip install {_missing_needs(name, needed)}"
        return Finding(name, WRONG, f"{found}, cannot be imported ({problem})", remedy)


def installed(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _import_problem(module: str) -> str | None:
    """Why a module cannot be imported, in one line; None where it can."""
    try:
        with _quiet():
            import_module(module)
    except Exception as error:  # whatever a broken package raises
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings and logs of packages, most of which are of what else could be installed."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _missing_needs(package: str, module: str) -> str:
    """The requirements of an installed package that are missing, for a command: that of a module and all others."""
    needs = {name: need for name, need in _requirements(package) if name not in _FBGEMM}
    found = [name for name in needs if _module(name) == module or installed(name) is None]
    return " ".join(f'"{needs[name]}"' for name in found) or module.replace("_", "-")


def _requirements(package: str) -> list[tuple[str, str]]:
    """Name, in small letters, and requirement of what an installed package needs itself, without its extras."""
    try:
        needs = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []
    plain = [need for need in needs if ";" not in need]  # the others are for extras, or an old Python
    return [(_name(need).lower(), need) for need in plain]


def _module(name: str) -> str:
    """The module of a package, by its name in small letters."""
    return _MODULES.get(name, name.replace("-", "_"))


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _satisfies(version: str, requirement: str) -> bool:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return True  # not known
    return Requirement(requirement).specifier.contains(version, prereleases=True)


def _minor(version: str) -> str:
    """The first two numbers of a version.

    >>> _minor("2.13.0+cpu")
    '2.13'

    """
    return ".".join(version.split("+")[0].split(".")[:2])
