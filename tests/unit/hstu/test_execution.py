"""How layers are computed: Triton or PyTorch, compiled or not, by what works. No GPU is needed to see it."""

import contextlib
import dataclasses
import platform
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config as inductor
from torch.nn.parallel import DistributedDataParallel

from hstu.model import HSTUEncoder, execution, layer, triton_agreement, triton_launch
from hstu.model.execution import Execution, choose_execution, compile_problem
from hstu.model.triton_blocks import KERNELS, Blocks
from tests.helpers.models.hstu_models import HSTU, with_execution

GPU, CPU = torch.device("cuda", 1), torch.device("cpu")
HERE = f"on node {platform.node()} (rank 0)"
BLOCKS = dict.fromkeys(KERNELS, Blocks(64, 32, 4, 2))


@pytest.fixture
def warned(monkeypatch):
    """Warnings of the choice; nothing has been chosen before."""
    found = []
    monkeypatch.setattr(execution.logger, "warning", found.append)
    monkeypatch.setattr(execution, "_CHOSEN", {})
    monkeypatch.setattr(triton_launch, "_BLOCKS", {})
    execution._warn_once.cache_clear()
    return found


@pytest.fixture
def gpu(monkeypatch, warned):
    """A GPU on which the kernels work and are faster than PyTorch."""
    properties = SimpleNamespace(
        name="H100", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    for name, works in {"why_not": None, "choose_blocks": BLOCKS, "slowness": None, "disagreement": None}.items():
        monkeypatch.setattr(execution, name, lambda *_, works=works: works)


def test_kernels_that_work_are_used_in_the_blocks_that_were_measured(gpu, warned):
    chosen = choose_execution(with_execution(HSTU, compute_dtype="bf16"), GPU)
    assert chosen == Execution(uses_triton=True, compiles=False)
    assert warned == []
    kind = triton_launch.LayerKind(torch.bfloat16, HSTU.kv_channels, True, False, 1, True, False)
    assert {(GPU, kind): BLOCKS} == triton_launch._BLOCKS


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("disagreement", "it computes outputs that are off by 3"),
        ("slowness", "its kernels take 9.00 ms for a batch that takes PyTorch 2.00 ms"),
        ("why_not", "a head has 257 channels; its kernels take at most 256 in torch.bfloat16"),
        ("choose_blocks", "its kernels cannot run (RuntimeError: Failed to find C compiler. Please specify)"),
    ],
)
def test_kernels_that_should_not_compute_are_not_the_default(gpu, warned, monkeypatch, name, reason):
    def tell(*_):
        if name == "choose_blocks":
            raise RuntimeError("Failed to find C compiler.\n  Please specify")
        return f"{reason}:" if name == "why_not" else reason

    monkeypatch.setattr(execution, name, tell)
    for _ in range(2):
        assert not choose_execution(with_execution(HSTU, compute_dtype="bf16"), GPU).uses_triton
    assert warned == [f"PyTorch computes the attention: Triton was tried, and {HERE} {reason}"]
    asked_for = with_execution(HSTU, compute_dtype="bf16", kernel_backend="triton")
    if name == "slowness":  # they are right
        assert choose_execution(asked_for, GPU).uses_triton
        return
    with pytest.raises(ValueError) as error:
        choose_execution(asked_for, GPU)
    assert str(error.value) == f"kernel_backend is 'triton' and {HERE} {reason}; choose 'pytorch'"


@pytest.mark.parametrize(
    ("pytorch", "kernels", "said"), [(2e-3, 9e-3, "9.00 ms .* PyTorch 2.00 ms"), (9e-3, 2e-3, None)]
)
def test_attention_of_pytorch_is_a_candidate(monkeypatch, pytorch, kernels, said):
    def seconds_of(run):
        by_kernels, dtype = run.args
        assert dtype == torch.bfloat16
        if not by_kernels:
            output, *gradients = run()
            assert output.abs().sum() > 0 and all(each.isfinite().all() for each in gradients)
        return kernels if by_kernels else pytorch

    monkeypatch.setattr(triton_agreement, "seconds_of", seconds_of)
    monkeypatch.setattr(triton_agreement, "_TIMED_LENGTHS", (60, 20, 5))
    kind = triton_launch.LayerKind(torch.bfloat16, 16, True, True, 2, True, True)
    found = triton_agreement.slowness(CPU, kind)
    assert found is None if said is None else re.search(said, found)


def test_what_is_compared_does_not_depend_on_the_default_device_of_a_script():
    """On CUDA, torch would not draw with the host's generator, and the kernels would count as broken."""
    kind = triton_launch.LayerKind(torch.float32, 16, True, True, 2, True, True)
    found = []
    for default in (CPU, torch.device("meta")):
        with default:
            run = triton_agreement.attention_of(CPU, kind, (60, 20, 5), (4, 0, 5), (1, 2, 0))
            found.append(run(False, torch.float32))
    assert all(map(torch.equal, *found)) and float(found[0][0].abs().sum()) > 0


def test_tables_that_are_measured_have_the_kernels_dtype_with_any_default_of_a_script():
    """The kernels read numbers of four bytes: in tables of two, their addresses are misaligned, which ends CUDA."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        inputs = triton_launch._sample_inputs(
            CPU, triton_launch.LayerKind(torch.bfloat16, 16, True, True, 2, True, True)
        )
    finally:
        torch.set_default_dtype(before)
    assert {each.dtype for each in (inputs.position, inputs.time, inputs.times)} == {torch.float32}


def test_what_is_compared_runs_in_the_blocks_that_were_chosen(monkeypatch):
    """A narrow window, which shows more, is that of another kind of layer: its blocks are not measured anew."""
    kind = triton_launch.LayerKind(torch.bfloat16, 64, True, False, 1, True, False, window=512)
    compared = []

    def attention_of(device, kind, *rows):
        compared.append(kind)
        return lambda by_kernels, dtype: [torch.ones(1)] * 3

    monkeypatch.setattr(triton_launch, "_BLOCKS", {(GPU, kind): BLOCKS})
    monkeypatch.setattr(triton_launch, "_measured_blocks", lambda *_: pytest.fail("blocks are measured again"))
    monkeypatch.setattr(triton_agreement, "attention_of", attention_of)
    assert triton_agreement.disagreement.__wrapped__(GPU, kind) is None
    assert [each.window for each in compared] == [50, 200]
    assert all(triton_launch.choose_blocks(GPU, each) is BLOCKS for each in compared)


def test_float32_on_a_gpu_is_slow_and_says_so_once(gpu, warned):
    for _ in range(2):
        choose_execution(HSTU, GPU)
    choose_execution(HSTU, CPU)
    assert warned == [
        "compute_dtype is 'fp32', the default; on a GPU 'bf16' is several times as fast: set compute_dtype"
    ]


@pytest.mark.slow
def test_without_a_compiler_layers_are_computed_without_torch_compile(warned):
    compile_problem.cache_clear()
    torch.manual_seed(0)
    plain = HSTUEncoder(HSTU)
    compiled = HSTUEncoder(with_execution(HSTU, compile=True))
    compiled.load_state_dict(plain.state_dict())
    inputs = torch.randn(6, HSTU.hidden_size), torch.tensor([4, 2])
    torch._dynamo.reset()
    with inductor.patch({"cpp.cxx": (None, "no-such-compiler")}):
        assert torch.equal(compiled(*inputs), plain(*inputs))
    compile_problem.cache_clear()
    assert len(warned) == 1 and "no-such-compiler" in warned[0]
    assert warned[0].startswith(f"layers are not compiled: torch.compile was tried, and {HERE} it failed (")
    assert warned[0].endswith("; install a C++ compiler and Python's headers on that node, or set compile to False")


@pytest.mark.slow
def test_with_a_compiler_they_are_compiled(warned):
    torch._dynamo.reset()
    assert compile_problem.__wrapped__(CPU) is None


def test_in_ddp_a_graph_is_not_cut_where_its_buckets_end(monkeypatch):
    """Layers wider than DDP's first bucket of 1 MiB: two graphs, as without DDP, of which torch would make four."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda method, **options: compiled(method, backend=count, **options))
    monkeypatch.setattr(layer, "execution_of", lambda *_: Execution(uses_triton=False, compiles=True))
    layer._compiled.cache_clear()
    torch._dynamo.reset()
    wide = dataclasses.replace(HSTU, hidden_size=512, num_attention_heads=2, kv_channels=256, num_layers=2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        encoder = DistributedDataParallel(HSTUEncoder(wide))
        for tokens in (3, 7, 5):
            encoder(torch.randn(tokens, 512, requires_grad=True), torch.tensor([tokens])).sum().backward()
    finally:
        dist.destroy_process_group()
        layer._compiled.cache_clear()
        torch._dynamo.reset()
    assert len(graphs) == 2
