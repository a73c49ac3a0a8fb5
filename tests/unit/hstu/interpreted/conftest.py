"""Cases for Triton's interpreter, which has to be asked for before Triton is imported: see test_interpreted.py."""

import os

import pytest

from hstu.model import triton_attention as triton_attention_module
from hstu.model import triton_launch
from hstu.model.triton_blocks import KERNELS, Blocks

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if IS_INTERPRETED else ["test_*.py"]


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch):
    """The interpreter of Triton 3.7 holds bfloat16 as 16 bits of an integer, and multiplies those in `tl.dot`."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def create_dot(builder, a, b, *options):
        a, b = (builder.cast_impl(each, tl.float32) if each.dtype.scalar == tl.bfloat16 else each for each in (a, b))
        return multiply(builder, a, b, *options)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def use_blocks(monkeypatch):
    """Sets the blocks of every kernel, which are small until it is called."""

    def use(queries, keys):
        blocks = dict.fromkeys(KERNELS, Blocks(queries, keys, 4, 2))
        monkeypatch.setattr(triton_launch, "choose_blocks", lambda *_: blocks)

    use(16, 16)
    return use


@pytest.fixture
def launched(monkeypatch):
    """Kernels that are launched, where the backward pass may take one launch."""
    found = []
    launch = triton_attention_module.launch
    monkeypatch.setattr(triton_attention_module, "launch", lambda *each: found.append(each[0]) or launch(*each))
    monkeypatch.setattr(triton_attention_module, "adds_up", lambda _: True)
    monkeypatch.setattr(triton_attention_module, "_SHORT_ROW", 0)
    return found
