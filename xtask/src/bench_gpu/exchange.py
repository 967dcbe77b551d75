#!/usr/bin/env python3
"""The row exchange beside its peers, one process a GPU: prints what each took and the ratios, and writes all of it to JSON.
usage: exchange.py JSON ROWS [ARGUMENT...]     needs two GPUs, and PyTorch with Triton for the peers. ROWS of a rank and layer; ARGUMENTs are the product's."""
import json, os, subprocess, sys

here = os.path.dirname(os.path.abspath(__file__))
path, rows, *arguments = sys.argv[1:]


def lines(command):
    print("$", " ".join(command), file=sys.stderr, flush=True)
    # No peer uses NVLink multicast either: a program that fails while it does can put a host's GPUs out of service.
    environment = dict(os.environ, NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        found = [json.loads(line) for line in process.stdout if line.startswith("{")]
    if process.returncode != 0:
        sys.exit(f"{command[0]} failed with {process.returncode}")
    return found


product = lines([os.path.join(here, "exchange"), rows, *arguments])
peers = lines([sys.executable, os.path.join(here, "peers/torch_exchange.py"), rows])
wrong = [case for case in peers if not case.get("correct", True)]
if wrong:
    sys.exit(f"a peer is wrong: {wrong[0]}")

head = next(case for case in product if "gpu" in case)
PULL, NCCL = "torch symm pull, 2 barriers", "nccl all-gather + all-to-all"
peer = {(case["peer"], case.get("slot")): case for case in peers}
barrier = peer["torch symm barrier", None]["graph_us"]

# Ratios to PULL in a graph that are to be reached, by slot; what a barrier may take in a graph, and an eager call on the host, in microseconds.
FEW = (1, 2, 4, 8, 16, 32)
if head["world"] == 2:
    REACH = {**dict.fromkeys(FEW, 2.5), 128: 2.0, **dict.fromkeys((512, 1024, 2048), 1.4)}
else:
    REACH = {**dict.fromkeys(FEW, 2.5), **dict.fromkeys((128, 256, 512, 1024, 2048), 1.6)}
BARRIER_US, HOST_US = 2.2, 12


def verdict(wanted, reached):
    return f"{wanted}: {'reached' if reached else 'MISSED'}"


print(f"{head['world']} x {head['gpu']}, {head['rows']:,} rows of a rank and layer, loaded in {head['loaded_s']} s. Microseconds, slowest rank.")
cases = []
for case in product:
    if "ways" in case:
        print(f"{case['way']}: measured at creation, by {', '.join(case['ways'])} blocks:",
              "; ".join(f"{m['slot']}: " + " ".join("-" if us is None else str(us) for us in m["us"]) for m in case["measured"]))
    elif "barrier_us" in case:
        print(f"{case['way']}: a barrier alone {case['barrier_us']:.2f}, torch's {barrier:.2f}: {barrier / case['barrier_us']:.2f}x   "
              + verdict(f"<= {BARRIER_US}", case["barrier_us"] <= BARRIER_US))
        print(f"{'':>8} {'slot':>5} | {'graph':>8} {'host':>6} {'eager':>7} | {'2 barriers':>10} {'eager':>7} {'ratio':>6} | {'nccl':>8} {'ratio':>6}")
        cases.append(dict(case, peer_us=barrier, ratio=barrier / case["barrier_us"]))
    elif "slot" in case:
        pull, nccl = peer[PULL, case["slot"]], peer[NCCL, case["slot"]]
        ratios = {name: other["graph_us"] / case["graph_us"] for name, other in ((PULL, pull), (NCCL, nccl))}
        notes, wanted = [], REACH.get(case["slot"])
        if wanted and case["way"] == "chosen":
            notes.append(verdict(f">= {wanted}", ratios[PULL] >= wanted))
        if case["way"] == "chosen":
            notes.append(verdict(f"host <= {HOST_US}", case["host_us"] <= HOST_US))
        print(f"{case['way']:>8} {case['slot']:>5} | {case['graph_us']:>8.2f} {case['host_us']:>6.1f} {case['eager_us']:>7.1f} | {pull['graph_us']:>10.2f} "
              f"{pull['eager_us']:>7.1f} {ratios[PULL]:>5.2f}x | {nccl['graph_us']:>8.2f} {ratios[NCCL]:>5.2f}x   {'   '.join(notes)}")
        cases.append(dict(case, peers={name: peer[name, case["slot"]] for name in ratios}, ratios=ratios))
with open(path, "w") as out:
    json.dump(dict(machine=head, cases=cases, product=product, peers=peers), out, indent=1)
