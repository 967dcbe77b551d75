#!/usr/bin/env python3
"""Lookups and hashes beside their peers: prints what both took and the ratios, and writes all of it to JSON.
usage: lookups.py JSON DEVICE_GIB PINNED_GIB     needs PyTorch with Triton for the peers."""
import json, os, sys

from figures import lines

here = os.path.dirname(os.path.abspath(__file__))
sizes = sys.argv[2:4]
text = os.path.join(here, "text.i32")


# A process a case: memory that another table has given back is slower.
cases = ["hash"] + [f"{table}:{width}" for table in ("device", "pinned") for width in (160, 256, 320)]
product = [line for case in cases for line in lines([os.path.join(here, "rates"), *sizes, "--text", text, "--only", case])]
peer = lines([sys.executable, os.path.join(here, "peers/torch_gather.py"), *sizes])
peer += lines([sys.executable, os.path.join(here, "peers/torch_text.py"), text, sizes[1]])

key = lambda case: (case.get("table"), case.get("ids", "uniform"), case.get("row_bytes"), case.get("rows"))
peers = {key(case): case for case in peer if "us" in case}
copies = {case["case"]: case["value"] for case in peer if "case" in case}
device_copy = copies.get("device copy, read + write GB/s", float("nan"))

# Ratios that are to be reached, by table, ids, and the most rows that each holds for (256-byte rows).
REACH = {
    ("device", "uniform"): [(1024, 1.0), (131072, 3.0), (1048576, 4.0)],
    ("pinned", "uniform"): [(1024, 1.0), (16384, 1.4), (131072, 3.0)],
    ("pinned", "text"): [(393216, 4.0)],
}
head = next(case for case in product if "gpu" in case)
print(f"{head['gpu']}, {head['threads']} threads; device copy {device_copy:.0f} GB/s, "
      f"pinned to device {copies.get('pinned host to device copy GB/s', float('nan')):.1f} GB/s")
rows = []
for case in product:
    if "calibration" in case:
        found = case["calibration"]
        print(f"calibration {found['row_bytes']} B: staged from {found['crossover_rows']} rows on; "
              f"{found['in_huge_pages_mib']} of {found['host_mib']} MiB in huge pages")
        for m in found["measured"]:
            shared = ", ".join(f"{share} {us:.1f}" for share, us in m["shared_us"].items())
            print(f"    {m['rows']:>7} rows: kernel {m['kernel_us']:.1f} us (again {m['again_us']:.1f}), staged {m['staged_us']:.1f} us, "
                  f"shared {shared}; the kernel's share {m['kernel_share']}")
    if "distinct" in case:
        found = case["distinct"]
        cost = found["us"] / found["without_us"] - 1
        print(f"looking for repeats where there are none, {found['batches']} batches of {found['rows']} rows: {found['us']:.1f} us, "
              f"without {found['without_us']:.1f} us: {cost:+.1%}   < 3%: {'reached' if cost < 0.03 else 'MISSED'}")
    if "product" not in case:
        continue
    if case["product"] == "hash":
        reach = {1: 2.0, 8192: 8.0}.get(case["tokens"])
        note = "" if reach is None else f"<= {reach}: {'reached' if case['us'] <= reach else 'MISSED'}"
        print(f"hash {case['tokens']:>8} tokens x {case['ids_per_token']} ids {case['us']:>10.2f} us   {note}")
        continue
    other = peers.get(key(case))
    gbps = case["rows"] * case["row_bytes"] / case["us"] / 1e3
    ratio = other["us"] / case["us"] if other else None
    wanted = dict(REACH.get((case["table"], case.get("ids", "uniform")), [])).get(case["rows"]) if case["row_bytes"] == 256 else None
    note = "" if not (wanted and ratio) else f">= {wanted}: {'reached' if ratio >= wanted else 'MISSED'}"
    if case["table"] == "device" and case["rows"] == 1048576:
        note += f"   {2 * gbps / device_copy:.0%} of the copy"
    if "found_share" in case:
        note += f"   distinct {case['distinct_share']:.2f} of n-grams, {other['distinct_share'] if other else 0:.2f} of rows; mixes {case['mixes']}"
    shown = "" if ratio is None else f"{other['us']:>10.2f} us {ratio:>6.2f}x"
    print(f"{case['table']:>7} {case.get('ids', 'uniform'):>8} {case['row_bytes']:>4} B {case['rows']:>8} rows "
          f"{case['us']:>10.2f} us {gbps:>7.1f} GB/s {shown}   {note}")
    rows.append(dict(case, peer_us=other and other["us"], ratio=ratio))
with open(sys.argv[1], "w") as out:
    json.dump(dict(machine=head, copies=copies, cases=rows, product=product, peers=peer), out, indent=1)
