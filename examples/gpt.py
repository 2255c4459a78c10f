"""A small GPT in plain PyTorch that learns to write Python, and the text it learns from.

Everything that `train.py` and `train_plain.py` share, in the order it happens: the source files
of Python's standard library are read, a vocabulary of short strings is learned from them, the text
becomes tokens and the tokens become windows; then come the model, its loss, its optimizer, and
sampling. Nothing here uses forge. If the environment has the variables of several ranks (torchrun,
forge's launchers), the ranks train together, each on its own windows.

Dimensions: B windows in a batch, T tokens in a window, D width, V size of the vocabulary.
"""

from __future__ import annotations

import math
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PACKAGES = [
    *(".", "asyncio", "collections", "concurrent/futures", "email", "html", "http", "importlib"),
    *("json", "logging", "multiprocessing", "unittest", "urllib", "wsgiref", "xml/dom", "xml/sax"),
]
CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), 127)))
NOT_CODE = re.compile(
    r'(?:(?<=:\n)|\A) *r?"""[\s\S]*?"""\n'  # docstrings
    r"|^ *#.*\n|  #.*"  # comments
    r"|(?<=\n {24}) +|(?<=\S  ) +",  # deep alignment
    re.MULTILINE,
)
WORD = re.compile(r"\n *|  +|[ .]?_*[A-Z]?[a-z]+|[ .]?_*[A-Z]+|_+| ?[^\w\s]+|.", re.DOTALL)
LONGEST_PIECE = 4


def read_sources(max_file_bytes: int, max_bytes: int) -> list[str]:
    """The texts of the standard library's modules, always in the same order.

    Args:
        max_file_bytes: Larger files are left out; the largest are mostly tables.
        max_bytes: Stop before the texts together get longer than this.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: list[str] = []
    for path in (path for package in PACKAGES for path in sorted((root / package).glob("*.py"))):
        if path.stat().st_size > max_file_bytes:
            continue
        text = NOT_CODE.sub("", path.read_text("ascii", errors="ignore").expandtabs(4))
        text = "".join(filter(CHARACTERS.__contains__, text)) if "\f" in text else text
        max_bytes -= len(text)
        if max_bytes < 0:
            break
        texts.append(text)
    if not texts:
        raise FileNotFoundError(f"{root}: no source files of Python's standard library found")
    return texts


class Vocabulary:
    """Every character, the most frequent words, and the most frequent fragments of the others."""

    def __init__(self, texts: list[str], num_words: int, num_fragments: int) -> None:
        words = Counter(word for text in texts for word in WORD.findall(text))
        pieces = dict.fromkeys(CHARACTERS)
        pieces |= dict.fromkeys(word for word, _ in words.most_common(num_words))
        fragments: Counter[str] = Counter()
        for word, count in words.items():
            if word not in pieces:
                for length in range(2, LONGEST_PIECE + 1):
                    for start in range(len(word) - length + 1):
                        fragments[word[start : start + length]] += count * (length - 1)
        pieces |= dict.fromkeys(piece for piece, _ in fragments.most_common(num_fragments))
        self.pieces = list(pieces)
        self._token_of = {piece: token for token, piece in enumerate(self.pieces)}
        self._tokens_of: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, which must consist of `CHARACTERS`."""
        tokens: list[int] = []
        for word in WORD.findall(text):
            if word not in self._tokens_of:
                self._tokens_of[word] = self._spell(word)
            tokens += self._tokens_of[word]
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""
        return "".join(self.pieces[token] for token in tokens)

    def _spell(self, word: str) -> list[int]:
        """One token for a known word, otherwise the longest known pieces from left to right."""
        if word in self._token_of:
            return [self._token_of[word]]
        tokens = []
        while word:
            lengths = range(min(LONGEST_PIECE, len(word)), 0, -1)
            length = next(n for n in lengths if word[:n] in self._token_of)
            tokens.append(self._token_of[word[:length]])
            word = word[length:]
        return tokens


class Windows(Dataset[Tensor]):
    """Random access to the windows of a text: (T + 1,) int64, inputs and their successors."""

    def __init__(self, tokens: list[int], length: int) -> None:
        self.tokens, self.length = torch.tensor(tokens), length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index * self.length : (index + 1) * self.length + 1]


@dataclass
class Data:
    """Training data, held-out data, and their vocabulary."""

    vocabulary: Vocabulary
    train: Windows
    held_out: Windows


def load_data(cfg: Any) -> Data:
    """Every `cfg.held_out_every`-th file is held out, whole."""
    texts = read_sources(cfg.max_file_bytes, cfg.max_bytes)
    seen = [text for i, text in enumerate(texts) if (i + 1) % cfg.held_out_every]
    unseen = [text for i, text in enumerate(texts) if (i + 1) % cfg.held_out_every == 0]
    vocabulary = Vocabulary(seen, cfg.num_words, cfg.num_fragments)
    train, held_out = (
        Windows(vocabulary.encode("\n".join(part)), cfg.window) for part in (seen, unseen)
    )
    return Data(vocabulary, train, held_out)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary position embedding: turn each pair of features by an angle that grows with time."""
    even, odd = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([even * cos - odd * sin, even * sin + odd * cos], dim=-1)


class Block(nn.Module):
    """Causal attention, then a feed-forward net; each adds to a residual stream (B, T, D)."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention, self.norm_feed = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)
        # A block that begins as the identity lets a short training start at a high rate.
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """`angles`: (T, D / num_heads / 2)."""
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(
            rotate(q, angles), rotate(k, angles), v, is_causal=True
        )
        x = x + self.dropout(self.out(heads.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.relu(self.up(self.norm_feed(x))).square()))


class GPT(nn.Module):
    """Tokens (B, T) to the logits of the token after each (B, T, V)."""

    angles: Tensor

    def __init__(
        self, num_tokens: int, window: int, width: int, depth: int, num_heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.window = window
        self.embedding = nn.Embedding(num_tokens, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, num_tokens, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.zeros_(self.head.weight)  # so that the first loss is that of guessing: ln(V)
        rates = 10_000.0 ** -torch.linspace(0, 1, width // num_heads // 2)
        angles = torch.outer(torch.arange(window), rates)
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens`: (B, T) int64, T at most the window."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.angles[: tokens.shape[1]])
        return self.head(self.norm(x))


def unwrapped(model: nn.Module) -> GPT:
    """The model without its DistributedDataParallel wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy of the next token in nats, a scalar; `batch` is (B, T + 1)."""
    batch = batch.to(unwrapped(model).angles.device, non_blocking=True)
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def build(cfg: Any) -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR, DataLoader[Tensor], Data]:
    """Everything a training loop needs; the same numbers whenever the seed is the same."""
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    data = load_data(cfg.data)
    model = GPT(len(data.vocabulary.pieces), cfg.data.window, **cfg.model).to(cfg.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=cfg.lr, betas=(0.9, 0.99), weight_decay=cfg.weight_decay, fused=True
    )

    def rate(step: int) -> float:
        warm_up = (step + 1) / cfg.warm_up_steps
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / cfg.steps))
        return min(warm_up, 0.05 + 0.95 * cosine)

    schedule = LambdaLR(optimizer, rate)
    sampler = None
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group()
        model = DistributedDataParallel(model)
        sampler = DistributedSampler(data.train, seed=cfg.seed, drop_last=True)
        torch.manual_seed(cfg.seed + dist.get_rank())  # different dropout on each rank
    is_shuffled = sampler is None
    loader = DataLoader(data.train, cfg.batch_size, is_shuffled, sampler, drop_last=True)
    return model, optimizer, schedule, loader, data


def endless(loader: DataLoader[Tensor]) -> Iterator[Tensor]:
    """One epoch after the other."""
    while True:
        yield from loader


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Data,
    max_batches: int = 8,
    check_stop: Callable[[], object] = lambda: None,
) -> float:
    """Mean loss on held-out files in nats per token; calls `check_stop` between batches."""
    model.eval()
    losses = []
    for batch in list(DataLoader(data.held_out, batch_size=32))[:max_batches]:
        losses.append(loss_fn(model, batch))
        check_stop()
    model.train()
    return torch.stack(losses).mean().item()


def report(step: int, held_out: float) -> float:
    """Print and return the held-out loss after `step` steps."""
    print(f"step {step}: held-out loss {held_out:.3f}", flush=True)
    return held_out


@torch.no_grad()
def sample(
    trained: nn.Module,
    vocabulary: Vocabulary,
    prompt: str,
    num_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """Text that the model generates after `prompt`; does not use the training's generator."""
    model = unwrapped(trained).eval()
    generator = torch.Generator(model.angles.device).manual_seed(seed)
    tokens = torch.tensor([vocabulary.encode(prompt)], device=model.angles.device)
    for _ in range(num_tokens):
        logits, candidates = model(tokens[:, -model.window :])[0, -1].topk(40)
        chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, candidates[chosen][None]], dim=1)
    model.train()
    return vocabulary.decode(tokens[0].tolist())


def keep(model: nn.Module, path: Path) -> None:
    """Write the weights, which are the same on all ranks, once."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(unwrapped(model).state_dict(), path)
