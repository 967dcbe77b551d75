#!/usr/bin/env python3
"""The row exchange beside its peers, one process a GPU: prints what each took and the ratios, and writes all of it to JSON.
usage: exchange.py JSON ROWS [ARGUMENT...]     needs two GPUs, and PyTorch with Triton for the peers. ROWS of a rank and layer; ARGUMENTs are the product's."""
import json, os, sys

from figures import lines, table, three_digits

here = os.path.dirname(os.path.abspath(__file__))
path, rows, *arguments = sys.argv[1:]
program = os.path.join(here, "exchange")
product = lines([program, rows, *arguments])
# No peer uses NVLink multicast either: a program that fails while it does can put a host's GPUs out of service.
peers = lines([sys.executable, os.path.join(here, "peers/torch_exchange.py"), rows], NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
wrong = [case for case in peers if not case.get("correct", True)]
if wrong:
    sys.exit(f"a peer is wrong: {wrong[0]}")

head = next(case for case in product if "gpu" in case)
if {case["world"] for case in peers} != {head["world"]}:
    sys.exit(f"{head['world']} ranks beside peers of {peers[0]['world']}")
PULL, NCCL = "torch symm pull, 2 barriers", "nccl all-gather + all-to-all"
peer = {(case["peer"], case.get("slot")): case for case in peers}
barrier, barrier_of_many = (peer["torch symm barrier", None][key] for key in ("graph_us", "of_many_us"))

# Ratios to PULL in a graph that are to be reached, by slot; what a barrier may take in a graph, and an eager call on the host, in microseconds.
FEW = (1, 2, 4, 8, 16, 32)
if head["world"] == 2:
    REACH = {**dict.fromkeys(FEW, 2.5), 128: 2.0, **dict.fromkeys((512, 1024, 2048), 1.4)}
else:
    REACH = {**dict.fromkeys(FEW, 2.5), **dict.fromkeys((128, 256, 512, 1024, 2048), 1.6)}
BARRIER_US, HOST_US = 2.2, 12
# What an exchange of so many tokens may take, as a ratio to that of two ranks of the same machine.
GROWTH_SLOT, GROWTH = 32, 1.6


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
        many = case["barrier_of_many_us"]
        print(f"{'':>8} in a graph of 256, where its launch and the ranks' skew hardly count: {many:.2f}, torch's {barrier_of_many:.2f}: {barrier_of_many / many:.2f}x")
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

took = {(case["way"], case["slot"]): case["graph_us"] for case in product if "slot" in case}
growth = None
if head["world"] > 2 and ("chosen", GROWTH_SLOT) in took:
    two = lines([program, rows, *arguments, "--ranks", "2", "--ways", "chosen"])
    of_two = next(case["graph_us"] for case in two if case.get("slot") == GROWTH_SLOT)
    growth = dict(slot=GROWTH_SLOT, of_two_us=of_two, ratio=took["chosen", GROWTH_SLOT] / of_two, product=two)
    print(f"From 2 to {head['world']} ranks at {GROWTH_SLOT} tokens: {of_two:.2f} to {took['chosen', GROWTH_SLOT]:.2f}: {growth['ratio']:.2f}x   "
          + verdict(f"<= {GROWTH}", growth["ratio"] <= GROWTH))

if {"chosen", "barrier"} <= {way for way, _ in took}:
    print()
    body = []
    for slot in sorted({slot for _, slot in took}):
        push, pull, nccl = took["chosen", slot], peer[PULL, slot]["graph_us"], peer[NCCL, slot]["graph_us"]
        body.append([f"{slot:,}", three_digits(push), three_digits(took["barrier", slot]), three_digits(pull), f"{pull / push:.2f}", three_digits(nccl), f"{nccl / push:.2f}"])
    table(["tokens a rank", "`Push`", "`Barrier`", "2 barriers", "ratio", "NCCL", "ratio"], body)

with open(path, "w") as out:
    json.dump(dict(machine=head, cases=cases, growth=growth, product=product, peers=peers), out, indent=1)
