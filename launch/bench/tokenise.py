"""Turns folders of text into one array of token ids for train_small.py.

    python launch/bench/tokenise.py corpus.npz FOLDER... --limit 11000000

Reads .txt, .rst, .pod, .html, .py and their .gz, drops HTML tags, and encodes with Mistral NeMo's tokenizer
(131,072 entries, from the package mistral-common). Files come in the order of their names, each followed by an
end-of-text token (id 2). The array is uint32, compressed. Debian's packages python3.11-doc, perl-doc,
postgresql-doc-15 and linux-doc-6.1 (of the first and the last only the folders `_sources`) hold more than the 11
million tokens used for the results here.
"""

import argparse
import gzip
import html
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SUFFIXES = {".txt", ".rst", ".pod", ".html", ".py"}
END_OF_TEXT = 2
TAGS = re.compile(r"<(script|style|head)\b.*?</\1>|<[^>]*>", re.S | re.I)
BLANK_LINES = re.compile(r"\n\s*\n\s*")


def documents(folders: list[Path]) -> Iterator[str]:
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            inner = path.with_suffix("") if path.suffix == ".gz" else path
            if inner.suffix not in SUFFIXES or not path.is_file() or path.is_symlink():
                continue
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            text = raw.decode("utf-8", "replace")
            if inner.suffix == ".html":
                text = html.unescape(TAGS.sub("", text))
            text = BLANK_LINES.sub("\n\n", text).strip()
            if len(text) >= 500:
                yield text


def tokenizer():
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    package = Path(importlib.util.find_spec("mistral_common").origin).parent
    return Tekkenizer.from_file(package / "data" / "tekken_240911.json")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--limit", type=int, default=11_000_000, help="tokens")
    arguments = parser.parse_args()
    encoder, parts, total = tokenizer(), [], 0
    for text in documents(arguments.folders):
        ids = encoder.encode(text, bos=False, eos=False)
        parts.append(np.array([*ids, END_OF_TEXT], dtype=np.uint32))
        total += len(parts[-1])
        if total >= arguments.limit:
            break
    tokens = np.concatenate(parts)[: arguments.limit]
    np.savez_compressed(arguments.out, tokens=tokens)
    print(f"{len(tokens)} tokens of {len(parts)} documents, {len(np.unique(tokens))} different ids")


if __name__ == "__main__":
    main()
