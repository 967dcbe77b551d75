"""CPU peer: what a checkpoint's headers say, read with the Python safetensors package (names, shapes and dtypes of every tensor of every file).
usage: safetensors_headers.py FOLDER REPEATS     prints one JSON line: seconds (median) and the number of tensors."""
import glob, json, sys, time
from safetensors import safe_open

seconds = []
for _ in range(int(sys.argv[2])):
    start, tensors = time.perf_counter(), 0
    for path in sorted(glob.glob(sys.argv[1] + "/*.safetensors")):
        with safe_open(path, "np") as file:
            for name in file.keys():
                part = file.get_slice(name)
                part.get_shape(), part.get_dtype()
                tensors += 1
    seconds.append(time.perf_counter() - start)
print(json.dumps(dict(peer="safetensors, Python", tensors=tensors, seconds=sorted(seconds)[len(seconds) // 2])))
