#!/usr/bin/env python3
"""engram-cuda on PyTorch's streams, memory and graphs."""
import ctypes, os, sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from engram_torch import INT, P, SIZE, U64, call, declare, good, lib, main, message, torch

declare(
    ("engram_table", P, [P, ctypes.c_char_p, SIZE, ctypes.c_float, U64, U64, U64]),
    ("engram_lookup", P, [ctypes.POINTER(P), SIZE, SIZE]),
    ("engram_run", INT, [P, P]),
    ("engram_prefetcher", P, [P, SIZE, INT, P]),
    ("engram_start", INT, [P, P]),
    ("engram_finish", INT, [P, SIZE, P]),
    ("engram_hash", INT, [P, ctypes.c_int32, P, SIZE, U64, P]),
    ("engram_close_table", None, [P]), ("engram_close_lookup", None, [P]), ("engram_close_prefetcher", None, [P]),
)

device = good(lib.engram_device(0))
WIDTH, ROWS, COLUMNS = 64, 5000, 4


class Tables:
    """bf16 tables of one layer each, in the memory of tensors."""

    def __init__(self, layers=1, pinned=False):
        make = dict(pin_memory=True) if pinned else dict(device="cuda")
        self.rows = [torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, **make) for _ in range(layers)]
        for rows in self.rows:
            rows.copy_(torch.randn(ROWS, WIDTH))
        torch.cuda.synchronize()
        self.tables = [good(lib.engram_table(device, b"bf16", WIDTH, float("nan"), t.data_ptr(), 0, ROWS)) for t in self.rows]
        self.lookup = good(lib.engram_lookup((P * layers)(*self.tables), layers, COLUMNS))

    def expected(self, ids):
        """[layer][token][columns * width]"""
        def layer(table, ids):
            rows, here = table.cuda()[ids.clamp(0, ROWS - 1).long()], (ids >= 0) & (ids < ROWS)
            return torch.where(here.unsqueeze(-1), rows, torch.zeros_like(rows)).reshape(ids.shape[0], -1)
        return torch.stack([layer(table, ids[:, k]) for k, table in enumerate(self.rows)])

    def close(self, lookup=True):
        torch.cuda.synchronize()
        if lookup:
            lib.engram_close_lookup(self.lookup)
        for table in self.tables:
            lib.engram_close_table(table)


def random_ids(tokens, layers=1, dtype=torch.int32):
    return torch.randint(-1, ROWS + 2, (tokens, layers, COLUMNS), dtype=dtype, device="cuda")


def same(found, expected):
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), "rows differ"


def test_lookups_follow_the_current_stream():
    for pinned in (False, True):
        tables = Tables(2, pinned)
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)):
            for dtype in (torch.int32, torch.int64):
                ids = torch.full((300, 2, COLUMNS), -1, dtype=dtype, device="cuda")
                fresh, out = random_ids(300, 2, dtype), torch.full((2, 320, COLUMNS * WIDTH), 9.0, dtype=torch.bfloat16, device="cuda")
                torch.cuda.synchronize()
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(2_000_000)
                    ids.copy_(fresh)
                    good(lib.engram_run(tables.lookup, ctypes.byref(call(ids, out, 1))))
                    after = out.clone()
                torch.cuda.synchronize()
                same(after[:, :300], tables.expected(fresh))
                assert (after[:, 300:] == 9).all(), "rows past the tokens were written"
        tables.close()


def test_strided_ids_of_a_wider_tensor():
    tables = Tables()
    wide = random_ids(100, 3)
    ids, out = wide[:, 1:2], torch.empty(1, 100, COLUMNS * WIDTH, dtype=torch.bfloat16, device="cuda")
    good(lib.engram_run(tables.lookup, ctypes.byref(call(ids, out, 1))))
    torch.cuda.synchronize()
    same(out, tables.expected(ids))
    tables.close()


def test_lookups_in_a_torch_graph_see_new_ids():
    tables = Tables(2)
    ids, out = random_ids(64, 2), torch.empty(2, 64, COLUMNS * WIDTH, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        good(lib.engram_run(tables.lookup, ctypes.byref(call(ids, out, 1))))
    for _ in range(5):
        ids.copy_(random_ids(64, 2))
        out.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        same(out, tables.expected(ids))
    del graph
    tables.close()


def test_prefetches_overlap_and_are_captured():
    tables = Tables(2, pinned=True)
    stream = torch.cuda.Stream()
    prefetcher = good(lib.engram_prefetcher(tables.lookup, 128, 0, stream.cuda_stream))
    ids, fresh = random_ids(128, 2), random_ids(128, 2)
    outs = [torch.empty(1, 128, COLUMNS * WIDTH, dtype=torch.bfloat16, device="cuda") for _ in range(2)]

    def step():
        torch.cuda._sleep(1_000_000)
        ids.copy_(fresh)
        good(lib.engram_start(prefetcher, ctypes.byref(call(ids, outs[0], 1))))
        kept = ids.clone()
        ids.fill_(0)
        for layer in range(2):
            good(lib.engram_finish(prefetcher, layer, ctypes.byref(call(kept, outs[layer], 1))))

    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    same(torch.cat(outs), tables.expected(fresh))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    for _ in range(5):
        fresh.copy_(random_ids(128, 2))
        for out in outs:
            out.fill_(3)
        graph.replay()
        torch.cuda.synchronize()
        same(torch.cat(outs), tables.expected(fresh))
    del graph
    lib.engram_close_prefetcher(prefetcher)
    tables.close(lookup=False)


def test_mistakes_are_errors_with_a_message():
    tables = Tables()
    ids, out = random_ids(10), torch.empty(1, 9, COLUMNS * WIDTH, dtype=torch.bfloat16, device="cuda")
    assert lib.engram_run(tables.lookup, ctypes.byref(call(ids, out, 1))) < 0 and "capacity is 9" in message(), message()
    host = torch.empty(1000)
    assert lib.engram_table(device, b"bf16", WIDTH, float("nan"), host.data_ptr(), 0, 10) is None and "lies on" in message(), message()
    assert lib.engram_table(device, b"e4m3-global", WIDTH, float("nan"), out.data_ptr(), 0, 10) is None and "scale" in message(), message()
    tables.close()


def test_hashes_run_on_a_foreign_stream():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000)
        tokens = torch.arange(3, 53, dtype=torch.int32, device="cuda")
        starts = torch.tensor([0, 50], dtype=torch.int32, device="cuda")
        history = torch.full((7,), 2, dtype=torch.int32, device="cuda")
        outs = [torch.full((50, 64), -7, dtype=torch.int32, device="cuda") for _ in range(2)]
        for out in outs:
            arrays = (U64 * 4)(tokens.data_ptr(), starts.data_ptr(), history.data_ptr(), out.data_ptr())
            count = good(lib.engram_hash(device, 2, arrays, 50, out.numel() * 4, stream.cuda_stream))
    torch.cuda.synchronize()
    ids = outs[0].flatten()[: 50 * count]
    assert torch.equal(outs[0], outs[1]) and (ids >= 0).all() and ids.unique().numel() > count


code = main(globals())
lib.engram_close_device(device)
sys.exit(code)
