"""usage: tokenise.py TOKENIZER REQUESTS SETS TOKENS FILE...     the first SETS * TOKENS tokens of the files' text, as requests for `engram hash`."""
import json, sys
from tokenizers import Tokenizer

tokenizer, requests, sets, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
text = "\n".join(open(name, errors="replace").read() for name in sorted(sys.argv[5:]))
ids = Tokenizer.from_file(tokenizer).encode(text, add_special_tokens=False).ids
assert len(ids) >= sets * tokens, f"{len(ids)} tokens of text, {sets * tokens} are needed"
with open(requests, "w") as out:
    json.dump(dict(token_space="raw", requests=[dict(tokens=ids[k * tokens:(k + 1) * tokens]) for k in range(sets)]), out)
