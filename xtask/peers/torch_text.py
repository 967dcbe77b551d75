"""The unified-address peer of torch_gather.py on row ids of real text: a Triton kernel with one program a row reads a table in pinned host memory.
usage: torch_text.py IDS [PINNED_GIB]     IDS: i32 [sets][8192][48], taken modulo the table's rows; prints one JSON line (median of graph replays)."""
import json, statistics, sys
import torch, triton, triton.language as tl


@triton.jit
def one_row(table, ids, out, first, last, W: tl.constexpr, B: tl.constexpr):
    p = tl.program_id(0).to(tl.int64)
    r = tl.load(ids + p)
    have = (r >= first) & (r < last)
    r = tl.where(have, r - first, 0)
    c = tl.arange(0, B)
    tl.store(out + p * W + c, tl.load(table + r * W + c, (c < W) & have, other=0), c < W)


class Pinned:  # hands Triton the mapped address of a pinned tensor
    def __init__(self, t): self.t, self.dtype = t, t.dtype
    def data_ptr(self): return self.t.data_ptr()


W, SET = 256, 8192 * 48
rows = int(float(sys.argv[2] if len(sys.argv) > 2 else 16) * (1 << 30)) // W
ids = torch.frombuffer(bytearray(open(sys.argv[1], "rb").read()), dtype=torch.int32).long().remainder(rows).reshape(-1, SET)
sets = [s.cuda() for s in ids]
table = Pinned(torch.empty((rows, W), dtype=torch.uint8, pin_memory=True))
out = torch.empty((SET, W), dtype=torch.uint8, device="cuda")
stream = torch.cuda.Stream()
run = lambda: [one_row[(SET,)](table, s, out, 0, rows, W=W, B=W) for s in sets]
with torch.cuda.stream(stream): run()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=stream): run()
times = []
for _ in range(12):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record(); graph.replay(); b.record(); b.synchronize(); times.append(a.elapsed_time(b) * 1e3 / len(sets))
share = statistics.mean(len(s.unique()) / SET for s in sets)
print(json.dumps(dict(gpu=torch.cuda.get_device_name(), peer="triton, one program a row", table="pinned", ids="text", row_bytes=W, rows=SET,
                      distinct_share=round(share, 3), us=round(statistics.median(times[2:]), 2))))
