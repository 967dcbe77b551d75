"""CPU peer: the compressed vocabulary built with the Python tokenizers package, token by token.
usage: tokenizer_map.py TOKENIZER_JSON REPEATS     prints one JSON line: seconds (median), counts and the map's SHA-256."""
import hashlib, json, sys, time
import numpy as np
from tokenizers import Regex, Tokenizer, normalizers as n

tokenizer, sentinel = Tokenizer.from_file(sys.argv[1]), "\uE000"
chain = n.Sequence([n.NFKC(), n.NFD(), n.StripAccents(), n.Lowercase(), n.Replace(Regex(r"[ \t\r\n]+"), " "),
                    n.Replace(Regex(r"^ $"), sentinel), n.Strip(), n.Replace(sentinel, " ")])


def compress():
    seen, out = {}, np.empty(tokenizer.get_vocab_size(), np.uint32)
    for i in range(out.size):
        text = tokenizer.decode([i], skip_special_tokens=False)
        key = tokenizer.id_to_token(i) if "\uFFFD" in text else chain.normalize_str(text) or text
        out[i] = seen.setdefault(key, len(seen))
    return out, len(seen)


seconds = []
for _ in range(int(sys.argv[2])):
    start = time.perf_counter()
    table, compressed = compress()
    seconds.append(time.perf_counter() - start)
print(json.dumps(dict(peer="tokenizers, Python", tokens=table.size, compressed=compressed, seconds=sorted(seconds)[len(seconds) // 2],
                      sha256=hashlib.sha256(table.astype("<u4").tobytes()).hexdigest())))
