"""What the tests in Python share: libengram_torch.so beside this file, and a frame that starts and ends as the other GPU tests do, with the line
test result: ..."""
import ctypes, os, sys, traceback

try:
    import torch
except ImportError:
    sys.exit("this test needs PyTorch; ENGRAM_WITHOUT_TORCH=1 leaves it out of the run")

here = os.path.dirname(os.path.abspath(__file__))
lib = ctypes.CDLL(os.environ.get("ENGRAM_TORCH_LIBRARY", os.path.join(here, "libengram_torch.so")))
P, U32, U64, SIZE, INT = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int


def declare(*functions):
    for name, result, arguments in functions:
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments


declare(
    ("engram_device", P, [U32]),
    ("engram_close_device", None, [P]),
    ("engram_error", None, [ctypes.c_char_p, SIZE]),
)


class Call(ctypes.Structure):
    _fields_ = [("stream", P), ("ids", U64), ("id_bytes", U64), ("wide", INT), ("form", INT), ("tokens", SIZE),
                ("token_stride", SIZE), ("layers", SIZE), ("columns", SIZE), ("out", U64), ("out_bytes", U64), ("capacity", SIZE)]


def call(ids, out=None, form=0):
    """Ids [tokens][layers][columns] on the current stream, and where their rows go if the caller says that."""
    tokens, layers, columns = ids.shape
    assert ids.stride(2) == 1 and ids.stride(1) == columns
    stride = ids.stride(0) if tokens > 1 else layers * columns
    span = ((tokens - 1) * stride + layers * columns) * ids.element_size()
    address, size = (0, 0) if out is None else (out.data_ptr(), out.numel() * out.element_size())
    return Call(torch.cuda.current_stream().cuda_stream, ids.data_ptr(), span, ids.dtype == torch.int64, form, tokens, stride,
                layers, columns, address, size, out.shape[1] if form else 0)


def message():
    text = ctypes.create_string_buffer(1000)
    lib.engram_error(text, 1000)
    return text.value.decode()


def good(result):
    if result is None or (isinstance(result, int) and result < 0):
        raise AssertionError(message())
    return result


class NotRun(Exception):
    """Raised by a test that this machine cannot run; says why."""


def main(names):
    """Runs the tests among `names` that the arguments ask for, and returns what to exit with."""
    tests = {name: test for name, test in names.items() if name.startswith("test_")}
    wanted = [a for a in sys.argv[1:] if not a.startswith("-")]
    count = {"ok": 0, "FAILED": 0, "ignored": 0}
    for name, test in tests.items():
        if wanted and not any(w in name for w in wanted):
            continue
        try:
            test()
            outcome, why = "ok", ""
        except NotRun as reason:
            outcome, why = "ignored", f", NOT RUN: {reason}"
        except Exception:
            outcome, why = "FAILED", "\n" + traceback.format_exc()
        count[outcome] += 1
        print(f"test {name} ... {outcome}{why}", flush=True)
    print(f"test result: {'FAILED' if count['FAILED'] else 'ok'}. {count['ok']} passed; {count['FAILED']} failed; "
          f"{count['ignored']} ignored; 0 measured; 0 filtered out", flush=True)
    return 101 if count["FAILED"] else 0
