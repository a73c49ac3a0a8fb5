"""The Triton backend without a GPU: its code by Triton's compiler, its refusals."""

import contextlib
import dataclasses
import importlib.util
import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from hstu.model import HSTUEncoder, layer, triton_launch
from hstu.model.attention_plan import plan_attention
from hstu.model.execution import Execution
from hstu.model.triton_attention import position_table, triton_attention
from hstu.model.triton_blocks import KERNELS, Blocks, candidate_blocks
from hstu.model.triton_launch import TILE_SPAN, LayerKind, uses_triton
from hstu.model.triton_plan import plan_triton_attention
from tests.helpers.batches.row_parts import rows_of_parts
from tests.helpers.models.hstu_models import HSTU

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs triton, which requirements/dev.txt has for Linux")


# By launch and width of a head, in bfloat16 for sm_90a: the most instructions per score of the blocks, without a
# bias and with one by position, and bytes of spills per thread.
LIMITS = {
    ("forward", 64): (6.0, 7.5, 0),
    ("forward", 128): (6.5, 8.0, 0),
    ("forward", 256): (11.0, 12.5, 48),
    ("backward", 64): (13.5, 15.0, 0),
    ("backward_key", 64): (11.5, 13.5, 0),
    ("backward_key", 128): (12.5, 15.0, 60),
    ("backward_key", 256): (19.5, 25.0, 52),
    ("backward_value", 256): (9.5, 11.0, 0),
    ("backward_query", 64): (10.5, 12.0, 0),
    ("backward_query", 128): (11.0, 12.5, 0),
    ("backward_query", 256): (20.0, 25.0, 56),
    ("bias_gradient", 64): (0.0, 12.5, 0),
    ("bias_gradient", 128): (0.0, 13.5, 0),
    ("bias_gradient", 256): (0.0, 17.0, 0),
}


@pytest.mark.slow
@needs_triton
@pytest.mark.timeout(900)
class TestCompiledKernels:
    @pytest.fixture
    def compiled(self):
        """What the benchmark of the kernels knows of their code; importing it needs Triton."""
        return importlib.import_module("benchmarks.models.attention_kernels")

    def test_they_keep_their_instruction_counts(self, compiled):
        """Of the blocks that are used there; `python -m benchmarks.models.attention_kernels` prints them."""
        for head_dim, (place, bias) in itertools.product((64, 128, 256), enumerate(("none", "position"))):
            layer = compiled.Layer(90, torch.bfloat16, head_dim, bias)
            best = {}
            for kernel, blocks in compiled.candidates(layer):
                if (limits := LIMITS.get((kernel, head_dim))) is None:
                    continue
                cost = compiled.cost_of(kernel, blocks, layer)
                line = (kernel, blocks, layer, cost)
                assert cost.sigmoids == 1.0 and cost.products == compiled.products_of(kernel, head_dim), line
                if cost.is_warp_group and cost.instructions <= limits[place] and cost.spills <= limits[2]:
                    best[kernel] = line
            kernels = {kernel for kernel, width in LIMITS if width == head_dim}
            expected = {kernel for kernel in kernels if bias != "none" or kernel != "bias_gradient"}
            assert set(best) == expected, (head_dim, bias)

    @pytest.mark.parametrize("architecture", [80, 100])
    def test_no_product_is_computed_twice(self, compiled, architecture):
        layer = compiled.Layer(architecture, torch.bfloat16, 64, "position")
        for kernel, blocks in compiled.candidates(layer):
            cost = compiled.cost_of(kernel, blocks, layer)
            assert not compiled.has_repeated_products(kernel, layer, cost), (kernel, blocks, cost)
            assert cost.shared <= compiled.SHARED_MEMORY[architecture], (kernel, blocks, cost)

    @pytest.mark.parametrize("architecture", [80, 90, 100])
    def test_some_blocks_of_wide_heads_fit_everywhere(self, compiled, architecture):
        layer, least = compiled.Layer(architecture, torch.bfloat16, 256, "position"), dict[str, int]()
        for kernel, blocks in compiled.candidates(layer):
            shared = compiled.compile_kernel(kernel, blocks, layer).metadata.shared
            least[kernel] = min(shared, least.get(kernel, shared))
        assert "backward_key" in least and max(least.values()) <= compiled.SHARED_MEMORY[architecture], least

    @pytest.mark.parametrize("architecture", [80, 90])
    def test_products_that_are_computed_twice_are_found(self, compiled, architecture):
        """Eight warps on 64 rows: two warps each compute the same products."""
        layer = compiled.Layer(architecture, torch.bfloat16, 64, "none")
        planted = compiled.cost_of("forward", Blocks(64, 64, 8, 2), layer)
        assert compiled.has_repeated_products("forward", layer, planted) and planted.sigmoids > 1, planted


@pytest.fixture
def kernel_keys(monkeypatch):
    """What Triton would compile for sm_90a, by kernel, of the launches that are made; nothing is launched."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    keys = {kernel: set() for kernel in KERNELS}

    class Recorder(dict):
        """A kernel, which is given its grid in brackets."""

        def __init__(self, name):
            super().__init__()
            function = triton_launch.function_of.__wrapped__(name)
            self.arg_names = function.arg_names
            bind = create_function_from_signature(
                function.signature, function.params, make_backend(GPUTarget("cuda", 90, 32))
            )
            self._run = lambda **options: keys[name].add(repr(bind(**options)[1:]))

        def __missing__(self, grid):
            return self._run

    monkeypatch.setattr(triton_launch, "function_of", {name: Recorder(name) for name in KERNELS}.get)
    return keys


@needs_triton
@pytest.mark.parametrize(("num_heads", "bias"), [(1, True), (16, False), (3, True)])
def test_kernels_are_compiled_once_for_all_batches(kernel_keys, monkeypatch, num_heads, bias):
    """Fifty batches of other lengths and targets, whose largest groups have from one to 32 of them."""
    monkeypatch.setattr(layer, "execution_of", lambda *_: Execution(uses_triton=True, compiles=False))
    sizes = {"num_attention_heads": num_heads, "kv_channels": 16, "target_group_size": 32, "max_sequence_length": 64}
    hstu = dataclasses.replace(HSTU, **sizes)
    encoder = HSTUEncoder(
        dataclasses.replace(hstu, time_bias=bias, time_buckets=16, position_bias="direct" if bias else "none")
    )
    generator = np.random.default_rng(0)
    most = set()
    for _ in range(50):
        lengths = generator.integers(1, 64, 4)
        targets = generator.integers(0, np.minimum(lengths, 1 + generator.integers(40)) + 1)
        most.add(int(targets.max()))
        tokens = torch.ones(int(lengths.sum()), HSTU.hidden_size)
        times = torch.arange(len(tokens)) if bias else None
        encoder(tokens, torch.from_numpy(lengths), torch.from_numpy(targets), None, times).sum().backward()
    assert {1, 16, 32} < most
    # What is measured, so that it is no other than what is launched then.
    kind = LayerKind(torch.float32, 16, True, False, 32, bias, bias)
    inputs = triton_launch._sample_inputs(torch.device("cpu"), kind)
    launched = triton_launch.choose_blocks(torch.device("cpu"), kind)
    assert set(launched) == set(KERNELS) - {"backward", "backward_value"} - (
        set() if bias else {"bias_gradient", "target_bias_gradient"}
    )
    for name in launched:
        triton_launch.launch(name, inputs, triton_launch._sample_outputs(name, inputs), inputs.query)
    assert {kernel: len(found) for kernel, found in kernel_keys.items()} == {
        kernel: int(kernel in launched) for kernel in KERNELS
    }


@given(rows_of_parts(400, 6), st.booleans())
def test_tiles_cover_every_token_once_the_most_work_first(rows, is_causal):
    lengths, targets, contextual = (torch.tensor(part, dtype=torch.int64) for part in rows)
    plan = plan_triton_attention(lengths, targets, contextual, is_causal=is_causal)
    history = lengths - targets if is_causal else lengths
    context = contextual if is_causal else torch.zeros_like(contextual)
    expected = torch.stack([lengths.cumsum(0) - lengths, lengths, history, context], dim=1)
    order = torch.argsort(-history, stable=True)
    assert plan.rows.tolist() == expected[order].tolist()
    sizes = lengths[order].tolist()
    expected = [(row, place) for row, length in enumerate(sizes) for place in range(0, length, TILE_SPAN)]
    for tiles in (plan.query_tiles, plan.key_tiles):
        assert sorted(map(tuple, tiles.tolist())) == expected and tiles.dtype == torch.int32
    visited, visiting = [], []  # numbers of keys and of queries
    for (row, place), (key_row, key_place) in zip(plan.query_tiles.tolist(), plan.key_tiles.tolist()):
        _, length, of_history, of_context = plan.rows[row].tolist()
        end = min(place + TILE_SPAN, length) if is_causal else length
        visited.append(max(of_history, end) if place < of_context else end)
        _, length, of_history, _ = plan.rows[key_row].tolist()
        seeing = length - key_place if key_place < of_history else TILE_SPAN
        visiting.append(seeing if is_causal else length)
    assert (visited, visiting) == (sorted(visited, reverse=True), sorted(visiting, reverse=True))
    assert plan.num_tokens == sum(rows[0]) and plan.longest == max(rows[0], default=0)
    assert plan.sees_ahead == plan_attention(lengths, targets, contextual, num_heads=1, is_causal=is_causal).sees_ahead


@given(rows_of_parts(400, 6), st.booleans(), st.booleans(), st.sampled_from([1, 3, 10**9]))
@example(([130], [0], [2]), True, True, 1)
def test_no_block_reads_outside_the_table_of_biases(rows, is_causal, has_context, group_size):
    """Of a bias that is just long enough; a block lies within a tile, whose distances these are."""
    lengths, targets, contextual = (torch.tensor(part, dtype=torch.int64) for part in rows)
    masks = {"is_causal": is_causal, "target_group_size": group_size}
    plan = plan_triton_attention(lengths, targets, contextual if has_context else None, **masks)
    reach = max(1, plan.longest)
    table, origin = position_table(torch.zeros(1, 2 * reach - 1 if plan.sees_ahead else reach), plan)
    for apart in plan.bias_work[:, 0].tolist():
        first = origin + apart - (TILE_SPAN - 1)
        assert first >= 0
        assert first + 2 * (TILE_SPAN - 1) < table.shape[1]


def test_fake_tensors_go_through_and_have_all_gradients():
    """One operator forward and two backward, the second of them for the biases."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "evenrank":
                self.seen.append(function._schema.name.removeprefix("evenrank::"))
            return function(*args, **(kwargs or {}))

    plan = plan_triton_attention(torch.tensor([5, 4]))
    with FakeTensorMode(allow_non_fake_inputs=True), Names() as names:
        projection = torch.empty(9, 4 * 32, requires_grad=True)
        bias = torch.empty(2, 9, requires_grad=True)
        _, v, q, k = (part.unflatten(1, (2, 16)) for part in projection.chunk(4, dim=1))
        output = triton_attention(q, k, v, bias, plan, normalizer=4.0)
        output.sum().backward()
    assert output.shape == (9, 2, 16) and projection.grad.shape == (9, 128) and bias.grad.shape == (2, 9)
    assert names.seen == ["hstu_attention", "hstu_attention_backward", "hstu_attention_bias_gradient"]


CUDA = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU by what it says of itself; Triton as imported."""
    says = SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: says.capability)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    triton_launch.why_not.cache_clear()
    yield says
    triton_launch.why_not.cache_clear()


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "says", "message"),
    [
        ("cpu", torch.float32, 16, {}, "the device is 'cpu'; its kernels need CUDA: choose 'pytorch'"),
        ("cuda", torch.bfloat16, 257, {}, "a head has 257 channels; its kernels take at most 256 in torch.bfloat16: "),
        ("cuda", torch.float32, 129, {}, "a head has 129 channels; its kernels take at most 128 in .*choose 'pytorch'"),
        ("cuda", torch.float64, 16, {}, "tokens are torch.float64; its kernels take torch.float32, .*choose 'pytorch'"),
        ("cuda", torch.float32, 16, {"capability": (7, 5)}, "compute capability 7.5; its kernels need 8.0: choose"),
    ],
)
def test_what_the_kernels_cannot_compute_is_named(gpu, device, dtype, head_dim, says, message):
    vars(gpu).update(says)
    with pytest.raises(ValueError, match=f"kernel_backend is 'triton' and .*{message}"):
        uses_triton("triton", torch.device(device), dtype, head_dim)
    assert not uses_triton("auto", torch.device(device), dtype, head_dim)


def test_triton_that_is_missing_is_named(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError, match="Triton cannot be imported .*install triton, or choose 'pytorch'"):
        uses_triton("triton", CUDA, torch.bfloat16, 64)
    assert not uses_triton("auto", CUDA, torch.bfloat16, 64)


def test_on_cuda_triton_is_the_default(gpu):
    assert uses_triton("auto", CUDA, torch.bfloat16, 64)
    assert not uses_triton("pytorch", CUDA, torch.bfloat16, 64)
    assert not uses_triton("auto", torch.device("cpu"), torch.bfloat16, 64)


def test_blocks_are_chosen_and_kernels_launched_on_the_device_of_the_tensors(monkeypatch):
    """Triton launches on the current device, even if the tensors are on another one."""
    on = []

    @contextlib.contextmanager
    def current(device):
        on.append(device)
        yield
        on.pop()

    seen = []
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(
        triton_launch, "choose_blocks", lambda *_: seen.append(("choose", *on)) or dict.fromkeys(KERNELS)
    )
    monkeypatch.setattr(triton_launch, "_launch", lambda *_: seen.append(("launch", *on)))
    second = torch.device("cuda", 1)
    query = SimpleNamespace(device=second, is_cuda=True, numel=lambda: 1, dtype=torch.bfloat16, shape=(1, 1, 16))
    inputs = triton_launch.Inputs(query, query, query, *(None,) * 8, 1.0, 1, True, False, 9, 0)
    triton_launch.launch("forward", inputs, {})
    assert seen == [("choose", second), ("launch", second)]


def test_blocks_divide_what_a_tile_spans():
    for dtype in triton_launch.DTYPES:
        for head_dim in (1, 16, 24, 64, 96, 128, 256)[: 6 + (dtype.itemsize == 2)]:
            for kernel, has_bias in itertools.product(KERNELS, (False, True)):
                candidates = candidate_blocks(kernel, dtype, head_dim, has_bias, (9, 0))
                assert candidates == sorted(set(candidates), key=candidates.index)
                for blocks in candidates:
                    assert TILE_SPAN % blocks.queries == TILE_SPAN % blocks.keys == 0
                    # The gradient of the bias by position is added along diagonals of square blocks.
                    assert "bias" not in kernel or blocks.queries == blocks.keys
                    assert np.log2([blocks.queries, blocks.keys]).min() >= 4


@pytest.fixture
def float32_products():
    """torch's settings of float32 products as a process begins; put back afterwards."""
    matmul, everywhere = torch.backends.cuda.matmul, torch.backends.fp32_precision
    before = matmul.fp32_precision
    matmul.fp32_precision = torch.backends.fp32_precision = "none"
    yield
    matmul.fp32_precision, torch.backends.fp32_precision = before, everywhere


@pytest.mark.parametrize(
    ("interface", "setting", "precision"),
    [
        ("none", None, "tf32x3"),
        ("old", "highest", "tf32x3"),
        ("old", "high", "tf32"),
        ("new", "ieee", "tf32x3"),
        ("new", "tf32", "tf32"),
        ("everywhere", "tf32", "tf32"),
    ],
)
def test_float32_products_are_as_either_interface_of_torch_says(float32_products, interface, setting, precision):
    if interface == "old":
        torch.set_float32_matmul_precision(setting)
    elif interface == "new":
        torch.backends.cuda.matmul.fp32_precision = setting
    elif interface == "everywhere":
        torch.backends.fp32_precision = setting
    blocks = candidate_blocks("forward", torch.float32, 64, True)[0]
    made_for = {
        dtype: triton_launch.constants(dtype, 64, blocks, True, fast=True)["PRECISION"]
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert made_for == {torch.float32: precision, torch.bfloat16: "tf32"}
