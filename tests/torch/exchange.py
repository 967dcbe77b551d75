#!/usr/bin/env python3
"""The exchange of engram-symm on PyTorch's streams and in its graphs, beside what a model runs: GEMMs and all-reduces of NCCL."""
import ctypes, os, subprocess, sys, tempfile, time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from engram_torch import INT, NotRun, P, SIZE, U32, U64, call, declare, good, lib, main, torch

declare(
    ("engram_group", P, [SIZE, SIZE, ctypes.c_char_p]), ("engram_close_group", None, [P]),
    ("engram_exchange", P, [P, P, ctypes.c_char_p, INT, U64, U32, U64]),
    ("engram_exchange_run", INT, [P, P, INT]),
    ("engram_exchange_rows", U64, [P]),
    ("engram_exchange_check", INT, [P]),
    ("engram_exchange_close", INT, [P]),
    ("engram_expected", INT, [U64, SIZE, P, SIZE, P]),
)
driver = ctypes.CDLL("libcuda.so.1")
driver.cuMemcpyDtoDAsync_v2.argtypes = [U64, U64, SIZE, P]

LAYERS, COLUMNS, ROW, ROWS, SETS = 2, 24, 264, 100_000, 8
# Well below the limit of a test, so that ranks that wait for each other say so.
DEADLINE_S, LIMIT_S = 20, 120
# Ways of an exchange, and tokens of each: pushes of few tokens, and as many waiting blocks as an exchange has.
WAYS = (("lines", 32), ("flags", 512), ("barrier", 128))
# Tells a process that it is a rank: RANK WORLD FOLDER.
RANK = "ENGRAM_TORCH_RANK"


class Exchange:
    """An exchange of this rank, sets of ids that it asks for, and the rows that they name. Compares every exchange's rows, on the GPU."""

    def __init__(self, group, device, rank, world, way, tokens):
        self.way, self.barrier = way, way == "barrier"
        self.handle = good(lib.engram_exchange(group, device, way.encode(), way == "lines", ROWS, tokens, DEADLINE_S))
        # Each column's ids are rows of the rank that owns the column.
        owner = torch.arange(COLUMNS, dtype=torch.int32) // -(-COLUMNS // world)
        random = torch.Generator().manual_seed(1000 * tokens + rank)
        ids = torch.randint(ROWS, (SETS, tokens, LAYERS, COLUMNS), dtype=torch.int32, generator=random) + owner * ROWS
        expected = torch.empty(SETS, tokens * LAYERS * COLUMNS * ROW, dtype=torch.uint8)
        good(lib.engram_expected(ROWS, world, ids.data_ptr(), SETS * tokens, expected.data_ptr()))
        self.ids, self.expected = ids.cuda(), expected.cuda()
        self.found, self.differs = torch.empty_like(self.expected[0]), torch.empty_like(self.expected[0], dtype=torch.bool)
        self.wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.compare(0)
        self.wrong.zero_()
        torch.cuda.synchronize()

    def compare(self, k):
        torch.ne(self.found, self.expected[k], out=self.differs)
        self.wrong += self.differs.any()

    def run(self, k, ids=None):
        """Exchanges set `k`, from where it lies or from `ids`, on the current stream."""
        ids = self.ids[k] if ids is None else ids
        good(lib.engram_exchange_run(self.handle, ctypes.byref(call(ids)), self.barrier))
        rows, stream = lib.engram_exchange_rows(self.handle), torch.cuda.current_stream().cuda_stream
        code = driver.cuMemcpyDtoDAsync_v2(self.found.data_ptr(), rows, self.found.numel(), stream)
        assert code == 0, f"copying the rows: {code}"
        self.compare(k)

    def check(self):
        torch.cuda.synchronize()
        good(lib.engram_exchange_check(self.handle))
        assert self.wrong.item() == 0, f"rows of {self.wrong.item()} exchanges by {self.way} differ"

    def close(self):
        self.check()
        good(lib.engram_exchange_close(self.handle))


def test_an_exchange_follows_the_current_stream_and_is_captured():
    device, group = good(lib.engram_device(0)), good(lib.engram_group(0, 1, b"one"))
    stream = torch.cuda.Stream()
    for way, tokens in WAYS:
        exchange = Exchange(group, device, 0, 1, way, tokens)
        ids = torch.zeros_like(exchange.ids[0])
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for k in range(SETS):
                torch.cuda._sleep(1_000_000)
                ids.copy_(exchange.ids[k])
                exchange.run(k, ids)
        exchange.check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            exchange.run(3, ids)
        with torch.cuda.stream(stream):
            # Rows of other ids first, so that the right ones are the replay's.
            for k in (5, 3, 5, 3):
                ids.copy_(exchange.ids[k])
                before = exchange.wrong.clone()
                graph.replay()
                assert (exchange.wrong - before).item() == (k != 3), f"a replay by {way} did not see its ids"
            exchange.wrong.zero_()
        exchange.close()
        del graph
    lib.engram_close_group(group)
    lib.engram_close_device(device)


class Model:
    """What runs beside exchanges, on two streams of its own."""

    def __init__(self):
        # 8,192 by 8,192 results: a tile for every SM, many times over.
        self.left, self.right = (torch.randn(shape, device="cuda").bfloat16() for shape in ((8192, 2048), (2048, 8192)))
        self.product = torch.empty(8192, 8192, dtype=torch.bfloat16, device="cuda")
        self.shared = torch.ones(16 << 20, dtype=torch.bfloat16, device="cuda")
        self.streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()

    def multiply(self):
        with torch.cuda.stream(self.streams[0]):
            torch.mm(self.left, self.right, out=self.product)

    def reduce(self):
        with torch.cuda.stream(self.streams[1]):
            torch.distributed.all_reduce(self.shared, torch.distributed.ReduceOp.AVG)

    def check(self):
        torch.cuda.synchronize()
        assert bool((self.shared == 1).all()), "an all-reduce went wrong"


# Which ranks enqueue their exchange before their all-reduce. Both wait for the other ranks' with blocks that occupy SMs.
ORDERS = {
    "exchanges first": lambda rank: True,
    "all-reduces first": lambda rank: False,
    "crossed": lambda rank: rank == 0,
    "crossed the other way": lambda rank: rank != 0,
}
# Of each order: windows of eager exchanges and of replays, each waited for; and how many there are in one.
EAGER_WINDOWS, EAGER, GRAPH_WINDOWS, REPLAYS, EXCHANGES = 50, 30, 20, 5, 10


def beside_a_model(rank, world, folder):
    """One rank: 10,000 exchanges, rows compared, while GEMMs fill the SMs and all-reduces wait for the other ranks."""
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world,
                                         device_id=torch.device("cuda", rank))
    device, group = good(lib.engram_device(rank)), good(lib.engram_group(rank, world, folder.encode()))
    model, streams = Model(), [torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    # What is loaded or allocated on first use waits for the device: once without neighbours.
    model.multiply()
    model.reduce()
    model.check()
    exchanges = [Exchange(group, device, rank, world, way, tokens) for way, tokens in WAYS]
    for exchange in exchanges:
        for stream in streams:
            with torch.cuda.stream(stream):
                exchange.run(0)
            exchange.check()
    graphs = [torch.cuda.CUDAGraph() for _ in exchanges]
    for exchange, graph in zip(exchanges, graphs):
        # NCCL's own thread asks for events meanwhile.
        with torch.cuda.graph(graph, stream=streams[0], capture_error_mode="thread_local"):
            for k in range(EXCHANGES):
                exchange.run(k % SETS)
        graph.replay()
        exchange.check()
    count = 0
    for name, exchange_first in ORDERS.items():
        start = time.monotonic()

        def window(rounds, stream, enqueue):
            for k in range(rounds):
                model.multiply()
                if not exchange_first(rank):
                    model.reduce()
                with torch.cuda.stream(stream):
                    enqueue(k)
                if exchange_first(rank):
                    model.reduce()
            for exchange in exchanges:
                exchange.check()

        for w in range(EAGER_WINDOWS):
            window(EAGER, streams[w % 2], lambda k: exchanges[k % 3].run((w + k) % SETS))
            count += EAGER
        for w in range(GRAPH_WINDOWS):
            window(REPLAYS, streams[w % 2], lambda k: graphs[(w + k) % 3].replay())
            count += REPLAYS * EXCHANGES
        if rank == 0:
            print(f"  {name}: {count} exchanges so far, this order in {time.monotonic() - start:.1f} s", flush=True)
    assert count == 10_000, count
    model.check()
    del graphs
    for exchange in exchanges:
        exchange.close()
    lib.engram_close_group(group)
    lib.engram_close_device(device)
    torch.distributed.destroy_process_group()


def test_waiting_blocks_stay_beside_gemms_and_all_reduces():
    world = torch.cuda.device_count()
    if world < 2:
        raise NotRun("it needs two GPUs")
    with tempfile.TemporaryDirectory() as folder:
        # A queue a stream: streams that share one wait for each other, whatever the SMs have room for. No NVLink multicast.
        environment = dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="32", NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
        ranks = [subprocess.Popen([sys.executable, os.path.abspath(__file__)], env=dict(environment, **{RANK: f"{rank} {world} {folder}"}))
                 for rank in range(world)]
        end = time.monotonic() + LIMIT_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            if any(rank.poll() for rank in ranks):
                # The others wait for one that has failed.
                end = min(end, time.monotonic() + 5)
            time.sleep(0.05)
        codes = [rank.poll() for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.wait()
        assert codes == [0] * world, f"ranks ended with {codes}, None for one that had to be ended"


if RANK in os.environ:
    rank, world, folder = os.environ[RANK].split(" ", 2)
    beside_a_model(int(rank), int(world), folder)
else:
    sys.exit(main(globals()))
