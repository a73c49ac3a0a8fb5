"""The native core: one library for every Python, what is summed over rows, and mistakes that it refuses."""

import re
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.perf_model.partitioner import as_int64_workloads, core, refine
from commons.perf_model.partitioner.arguments import CheckedArguments
from commons.perf_model.partitioner.sources import NATIVE, hash_of_sources
from tests.helpers.jobs.programs import run_program

INT64_MAX = 2**63 - 1
IMPORT = "import commons.perf_model.partitioner.core"


@given(st.lists(st.sampled_from([0, 1, 7, 2**61, 2**62 - 1, 2**62, INT64_MAX, -1]), max_size=6))
def test_sums_that_overflow_are_seen(values):
    array = np.array(values, np.int64)
    fits = min(values, default=0) >= 0 and sum(values) < 2**62
    assert core.all_within(array, INT64_MAX, 2**62 - 1) == fits
    assert core.all_within(array, 6, INT64_MAX) == all(0 <= value <= 6 for value in values)
    if fits:
        assert as_int64_workloads(array).tolist() == values
    elif min(values) < 0:
        with pytest.raises(ValueError, match=rf"workloads\[{values.index(-1)}\] is -1; values must be non-negative"):
            as_int64_workloads(array)
    else:
        with pytest.raises(ValueError, match=f"the sum of workloads is {sum(values)}; it must be below 2\\^62"):
            as_int64_workloads(array)


def test_many_rows_are_the_same_without_the_gil():
    """More than `FEW_NUMBERS`: the calls that release the GIL."""
    places = np.random.default_rng(0).integers(0, 64, 2 * core.FEW_NUMBERS)
    assert core.all_within(places, 63, 2**62) and not core.all_within(places, 62, 2**62)


def test_arrays_of_another_type_are_refused():
    for values in (np.zeros(3), np.zeros(3, np.int32), np.zeros(6, np.int64)[::2], [0, 0, 0]):
        with pytest.raises(TypeError, match="it reads contiguous int64 arrays of 1-d: convert it"):
            core.all_within(values, 2, 2)
    by_column, ragged = np.ones((2, 2), np.int64, order="F"), np.zeros((2, 20), np.uint8)[:, :16].view(np.int64)
    for words in (by_column, ragged, np.ones((2, 2), np.int32), np.ones(4, np.int64)):
        with pytest.raises(ValueError, match=r"they are int64 \(num_ranks, n\): sizes do not match"):
            core.rows_of_words(words)
    with pytest.raises(ValueError, match="at least one row and one partition"):
        core.lower_bound(CheckedArguments([], 2))


def test_refine_refuses_a_start_that_breaks_what_it_keeps():
    with pytest.raises(ValueError, match=r"assignment\[1\] is 2; a home is a partition in \[0, 2\)"):
        refine([1, 2, 3], [0, 2, 1], 2)
    with pytest.raises(ValueError, match="a partition of 20 tokens, max_tokens is 6"):
        refine([1] * 4, [0] * 4, 2, tokens=[5] * 4, max_tokens=6)
    with pytest.raises(ValueError, match="assignment is None; one value per row is needed"):  # was an AssertionError
        refine([1, 2], None, 2)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 5), st.data())
def test_refine_lowers_the_largest_load_and_keeps_the_cap(workloads, parts, data):
    rows = len(workloads)
    start = np.array(data.draw(st.lists(st.integers(0, parts - 1), min_size=rows, max_size=rows)))
    tokens = np.array(data.draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows)))
    cap = max(1, int(np.bincount(start, weights=tokens, minlength=parts).max()))
    refined = refine(workloads, start, parts, tokens=tokens, max_tokens=cap)
    before, after = (np.bincount(each, weights=workloads, minlength=parts).max() for each in (start, refined))
    assert after <= before
    assert np.bincount(refined, weights=tokens, minlength=parts).max() <= cap
    assert np.array_equal(refine(workloads, start, parts, tokens=tokens), refine(workloads, start, parts))
    assert refine([], [], parts).tolist() == []


def test_planning_lets_other_threads_run():
    workloads = np.random.default_rng(0).zipf(1.3, 4096).clip(max=4096) ** 2
    arguments = CheckedArguments(workloads, 128)
    main_ran = threading.Event()
    plans_until_main_ran = []

    def plan_until_main_ran():
        for count in range(2000):
            if main_ran.is_set():
                plans_until_main_ran.append(count)
                return
            core.make_plan(arguments)

    # With a switch interval this long, the main thread gets the interpreter only where planning lets go of it.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        planner = threading.Thread(target=plan_until_main_ran)
        planner.start()
        main_ran.set()
        planner.join()
    finally:
        sys.setswitchinterval(interval)
    assert plans_until_main_ran


def test_the_version_is_that_of_the_sources_less_their_comments(tmp_path):
    assert hash_of_sources() == core.SOURCES
    copied = Path(shutil.copytree(NATIVE, tmp_path / "native"))
    header = copied / "speeds.hpp"
    header.write_text("// Another comment.\n\n" + header.read_text())
    assert hash_of_sources(copied) == core.SOURCES
    header.write_text(header.read_text().replace("return value / by", "return 1 + value / by"))
    assert hash_of_sources(copied) != core.SOURCES


def test_methods_have_the_order_of_the_core():
    """The shuffle accepts every number before the last name, which is none of them."""
    names = re.search(r"enum class Method {(.*?)}", (NATIVE / "plan.hpp").read_text())[1].split(",")
    assert [name.strip().lower() for name in names] == [f"k{each.replace('_', '')}" for each in (*core.METHODS, "end")]


@pytest.fixture
def copied_package(tmp_path):
    """A copy of the planner's package, whose core can be damaged."""
    commons = tmp_path / "commons"
    whole = Path(core.__file__).parents[2]
    for path in ("__init__.py", "checks.py", "perf_model"):
        copy = shutil.copytree if (whole / path).is_dir() else shutil.copy
        commons.mkdir(exist_ok=True)
        copy(whole / path, commons / path)
    return commons / "perf_model" / "partitioner"


def error_of_import(package):
    """The last line that an import prints on stderr."""
    done = run_program(sys.executable, "-c", IMPORT, cwd=package.parents[2])
    assert done.returncode
    return done.stderr.splitlines()[-1]


def test_a_core_that_is_missing_damaged_or_old_says_what_to_do(copied_package):
    source = copied_package / "native" / "bounds.hpp"
    source.write_text(source.read_text() + "\nnamespace { int more; }\n")
    assert "was built from other sources than those beside it: install" in error_of_import(copied_package)
    library = copied_package / "libevenrank.so"
    library.write_bytes(b"no library")
    assert "cannot be loaded" in error_of_import(copied_package)
    library.unlink()
    assert "is missing; evenrank plans with it: install evenrank again" in error_of_import(copied_package)
