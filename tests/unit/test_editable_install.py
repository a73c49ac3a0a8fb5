"""After `make install`, which is `pip install -e .`, evenrank is found from any folder, that above the checkout too.

The checkout's folder is called evenrank, as the package in it: from the folder above, Python takes it for a namespace
package, before it looks for what a finder of an editable install knows, but behind what lies on its path.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "ci", "evenrank", "commons", "hstu", "sid_gr")
SCRIPT = """
import commons, evenrank, hstu, sid_gr
from evenrank import HSTUAttentionTask
print(*(module.__file__ for module in (evenrank, commons, hstu, sid_gr)), sep="\\n")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A checkout called evenrank and the Python of an environment where it is installed as editable."""
    folder = tmp_path_factory.mktemp("work")
    checkout, environment, wheels = folder / "evenrank", folder / "environment", folder / "wheels"
    checkout.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, checkout)
    wheels.mkdir()
    build = "import sys, evenrank_build; evenrank_build.build_editable(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(wheels)],
        cwd=checkout,
        env=plain_environment() | {"PYTHONPATH": str(checkout / "ci" / "build_backend")},  # as pip finds the backend
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    asked = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
    )
    site = Path(asked.stdout.strip())
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:  # what pip does with a wheel of an editable install
        archive.extractall(site)
    # The packages that it needs; what is installed there as editable is not seen.
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return checkout, python


def plain_environment():
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@pytest.mark.parametrize("place", ["above the checkout", "in the checkout", "elsewhere"])
def test_a_script_finds_the_package(installed, tmp_path, place):
    checkout, python = installed
    folder = {"above the checkout": checkout.parent, "in the checkout": checkout, "elsewhere": tmp_path}[place]
    script = folder / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [python, script.name], cwd=folder, env=plain_environment(), capture_output=True, text=True, timeout=120
    )
    script.unlink()
    assert done.returncode == 0, done.stderr
    packages = ("evenrank", "commons", "hstu", "sid_gr")
    assert done.stdout.split() == [str(checkout / package / "__init__.py") for package in packages]
