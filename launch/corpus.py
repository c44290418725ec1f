"""Text to tokens to Megatron-core's own GPTDataset.

A corpus is every text file of a source, in an order that does not depend on the file system; a file belongs to the
validation set by a hash of its relative path, so that adding files moves none. Tokens go once into Megatron's indexed
format (.bin, .idx) in a folder named after everything that decides its contents, and are memory-mapped from there.
GPTDataset then packs documents into sequences and shuffles them with the run's seed; its index helpers are
compiled in megatron-core's wheels, so nothing is compiled here.

Tokenizers: `tekken`, the 131,072 entries of Mistral NeMo that the package mistral-common carries (no download). BPE
entries are ranked, so a head with fewer entries uses the first ones. `bytes`: 256 bytes and an end of document.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


class BytesTokenizer:
    vocab_size, eod = 257, 256
    unique_identifiers = {"class": "bytes"}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class TekkenTokenizer:
    def __init__(self, limit: int):
        import mistral_common
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        path = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
        description = json.loads(path.read_text())
        self.vocab_size = min(limit, description["config"]["default_vocab_size"])
        description["config"]["default_vocab_size"] = self.vocab_size
        with tempfile.TemporaryDirectory() as folder:
            shortened = Path(folder) / path.name
            shortened.write_text(json.dumps(description))
            self._tekken = Tekkenizer.from_file(str(shortened))
        self.eod = self._tekken.eos_id
        self.unique_identifiers = {"class": path.name, "size": self.vocab_size}

    def encode(self, text: str) -> list[int]:
        return self._tekken.encode(text, bos=False, eos=False)


def make_tokenizer(name: str, vocab_size: int) -> Any:
    """The tokenizer `name` for a head of `vocab_size` rows."""
    tokenizer: Any = BytesTokenizer() if name == "bytes" else TekkenTokenizer(vocab_size)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(f"data.tokenizer={name} needs model.vocab_size >= {tokenizer.vocab_size}, got {vocab_size}")
    tokenizer.pad = -1  # GPTDataset asks for an id that is no token
    return tokenizer


def documents(source: str) -> Iterator[tuple[str, str]]:
    """(name, text) of every document of `source`, in order of name."""
    if source == "stdlib":
        root, suffixes = Path(sysconfig.get_paths()["stdlib"]), {".py", ".rst", ".txt"}
    else:
        root, suffixes = Path(source), {".txt", ".jsonl"}
        if not root.is_dir():
            raise ValueError(f"data.source: expected 'stdlib' or a folder with .txt or .jsonl files, got {source!r}")
    for path in sorted(p for p in root.rglob("*") if p.suffix in suffixes and p.is_file()):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or "dist-packages" in name:
            continue
        text = path.read_text(errors="replace")
        if path.suffix != ".jsonl":
            yield name, text
            continue
        for number, line in enumerate(text.split("\n")):  # JSON strings may hold the other line ends of Unicode
            if line.strip():
                yield f"{name}:{number}", _text_of(line, f"line {number + 1} of {name}")


def _text_of(line: str, place: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError, IndexError):
        text = None
    if not isinstance(text, str):
        raise ValueError(f'data.source: expected an object with a string "text", got {line[:60]!r} in {place}')
    return text


def is_validation(name: str, percent: int) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100 < percent


def _write(folder: Path, source: str, percent: int, tokenizer: Any) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder.mkdir(parents=True)
    dtype = np.int32 if tokenizer.vocab_size > np.iinfo(np.uint16).max + 1 else np.uint16
    builders = {split: IndexedDatasetBuilder(str(folder / f"{split}.bin"), dtype) for split in ("train", "valid")}
    counts = dict.fromkeys(builders, 0)
    for name, text in documents(source):
        ids = tokenizer.encode(text) + [tokenizer.eod]
        split = "valid" if is_validation(name, percent) else "train"
        builders[split].add_document(torch.tensor(ids), [len(ids)])
        counts[split] += len(ids)
    if not all(counts.values()):
        empty = [split for split, count in counts.items() if not count]
        raise ValueError(f"data.source: expected text for training and validation, got none for {empty} in {source!r}")
    for split, builder in builders.items():
        builder.finalize(str(folder / f"{split}.idx"))
    (folder / "tokens.json").write_text(json.dumps(counts))


def prepare(data: Any, tokenizer: Any) -> Path:
    """The folder with the tokens of `data`, made by one rank of each node when it is not there. All ranks call it."""
    import sys

    identity = [data.source, data.validation_percent, tokenizer.unique_identifiers]
    if data.source == "stdlib":
        identity.append(sys.version)
    else:
        files = sorted(Path(data.source).rglob("*"))
        identity.append([(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files if p.is_file()])
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    folder = Path(data.cache) / f"{data.tokenizer}-{key}"
    refused = None
    if int(os.environ.get("LOCAL_RANK", "0")) == 0 and not folder.exists():
        # A killed run leaves its unfinished folder, and containers on other nodes may have the same process ids.
        unfinished = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}")
        try:
            _write(unfinished, data.source, data.validation_percent, tokenizer)
            unfinished.rename(folder)
        except ValueError as error:
            refused = str(error)
        except OSError as error:
            if not folder.exists():  # otherwise another node on the same file system was first
                refused = f"data.cache: expected a folder to write to, got {data.cache!r}: {error.strerror}"
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, refused)  # ranks that would wait in vain leave with the same words
    for refused in everyone:
        if refused is not None:
            raise ValueError(refused)
    return folder


def datasets(folder: Path, tokenizer: Any, sequence_length: int, seed: int, train: int, valid: int) -> tuple:
    """Megatron's (train, validation) GPTDatasets with at least so many sequences each."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        blend_per_split=[([str(folder / "train")], None), ([str(folder / "valid")], None), None],
        path_to_cache=str(folder / "index"),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    build = BlendedMegatronDatasetBuilder(GPTDataset, [train, valid, None], lambda: True, config).build
    train_set, valid_set, _ = build()
    return train_set, valid_set
