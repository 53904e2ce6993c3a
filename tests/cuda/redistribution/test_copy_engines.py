"""What the copy engines are told of a strided box. Needs cuda-bindings, but no GPU."""

from __future__ import annotations

import pytest

from shardmath.operators.matmul.gpu import copy_engines
from shardmath.redistribution.copies import StridedCopy

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

SOURCE, TARGET, STREAM = 1 << 20, 1 << 30, 7
BOXES = {
    "bytes": ((), (), ()),
    "rows": ((5,), (4096,), (1024,)),
    "layers of rows": ((3, 5), (32768, 4096), (8192, 1024)),
}


@pytest.mark.parametrize("box", BOXES)
def test_box(monkeypatch, box):
    shape, src_strides, dst_strides = BOXES[box]
    calls = []
    monkeypatch.setattr(copy_engines, "call", lambda *args: calls.append(args))
    copies = copy_engines.engine_copies(
        [StridedCopy(0, 0, 512, shape, 64, src_strides, 128, dst_strides)]
    )
    copies.launch(STREAM, [SOURCE], TARGET)
    ((name, *given),) = calls
    assert given.pop() == STREAM
    source, target = SOURCE + 64, TARGET + 128
    if not shape:
        assert (name, given) == ("cuMemcpyDtoDAsync", [target, source, 512])
        return
    (what,) = given
    assert name == f"cuMemcpy{len(shape) + 1}DAsync"
    assert (int(what.srcDevice), int(what.dstDevice), what.WidthInBytes) == (source, target, 512)
    assert (what.Height, what.srcPitch, what.dstPitch) == (5, 4096, 1024)
    if len(shape) == 2:
        assert (what.Depth, what.srcHeight, what.dstHeight) == (3, 8, 8)
