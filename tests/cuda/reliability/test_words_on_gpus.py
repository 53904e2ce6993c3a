"""32-bit writes under torch's names, on arrays of GPUs: at once, and in a CUDA graph."""

from __future__ import annotations

import importlib

from shardmath import symmetric_memory as symm_mem


def heard(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


def check(context):
    torch = importlib.import_module("torch")
    torch.cuda.set_device(context.device_id)
    device = f"cuda:{context.device_id}"
    found = []
    with context:
        for words in (
            symm_mem.empty(8, dtype=torch.uint32, device=device),
            torch.empty(8, dtype=torch.uint32, device=device),
        ):
            words.view(torch.int32).fill_(1)
            assert symm_mem.memset32(words, 2, 0xFFFFFFFF, 3) is words
            assert symm_mem.stream_write_value32(words, 7, 9) is words
            found.append(words.tolist())
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            symm_mem.memset32(words, 0, 5, 7)
            symm_mem.stream_write_value32(words, 1, 6)
        found.append(words.tolist())
        graph.replay()
        found.append(words.tolist())
        said = [
            heard(lambda: symm_mem.memset32(words, 6, 0, 3)),
            heard(lambda: symm_mem.memset32(words[::2], 0, 0)),
        ]
    return found, said


def test_they_are_put_on_the_current_stream(gpus):
    written = [1, 1, *[0xFFFFFFFF] * 3, 1, 1, 9]
    replayed = [5, 6, 5, 5, 5, 5, 5, 9]
    ((found, said),) = gpus.run(check, ranks=1)
    assert found == [written, written, written, replayed]
    assert said[0].startswith("cannot write 0") and "contiguous 1-D uint32" in said[1]
