#!/usr/bin/env python3
"""The row exchange with DeepSeek-V4.1-Flash's tables at full size, one process a GPU: in all GPUs' memory, and from pinned memory of the host. Prints
what each took and the ratios, and writes all of it to JSON.
usage: full-size.py JSON [ARGUMENT...]     ARGUMENTs are the product's."""
import json, os, sys

from figures import lines, table, three_digits

here = os.path.dirname(os.path.abspath(__file__))
path, *arguments = sys.argv[1:]
product = lines([os.path.join(here, "exchange"), "--full-size", *arguments])
head = {case["table"]: case for case in product if "gpu" in case}
took = {(case["table"], case["way"], case["slot"]): case["graph_us"] for case in product if "slot" in case}

device, pinned = head["device"], head["pinned"]
print(f"{device['world']} x {device['gpu']}: {device['gib']:.2f} GiB of rows in device memory, loaded in {device['loaded_s']} s; "
      f"{pinned['gib']:.2f} GiB of them in pinned memory, loaded in {pinned['loaded_s']} s.")
print("Microseconds in a CUDA graph, slowest rank; ratios to the exchange with tables in device memory. In the last columns each rank looks up as many "
      "rows, of its own part, by itself.\n")
rows = []
for slot in sorted({slot for *_, slot in took}):
    exchange, barrier = took["device", "chosen", slot], took["device", "barrier", slot]
    from_host = [took["pinned", way, slot] for way in ("chosen", "barrier", "alone")]
    ratios = [f"{figure / exchange:.2f}" for figure in from_host]
    rows.append([f"{slot:,}", three_digits(exchange), three_digits(barrier), three_digits(from_host[0]), ratios[0], three_digits(from_host[1]), three_digits(from_host[2]), ratios[2]])
table(["tokens a rank", "device: `Push`", "`Barrier`", "pinned: `Push`", "ratio", "`Barrier`", "no exchange", "ratio"], rows)
with open(path, "w") as out:
    json.dump(dict(machine=device, pinned=pinned, product=product), out, indent=1)
