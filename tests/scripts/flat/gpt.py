"""A character-level GPT with Hydra: warm-up and cosine, decay by group, polled evaluations."""

import math
from itertools import islice
from pathlib import Path

import hydra
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import forge


class Text(Dataset):
    def __init__(self, text, block):
        self.vocabulary = sorted(set(text))
        self.data = torch.tensor([self.vocabulary.index(c) for c in text])
        self.block = block

    def __len__(self):
        return len(self.data) - self.block

    def __getitem__(self, i):
        return self.data[i : i + self.block], self.data[i + 1 : i + self.block + 1]


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            one.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for one in self.qkv(self.norm1(x)).split(c, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, cfg):
        super().__init__()
        self.token = nn.Embedding(vocabulary, cfg.width)
        self.position = nn.Embedding(cfg.block, cfg.width)
        self.blocks = nn.Sequential(
            *[Block(cfg.width, cfg.heads, cfg.dropout) for _ in range(cfg.layers)]
        )
        self.norm = nn.LayerNorm(cfg.width)
        self.head = nn.Linear(cfg.width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x):
        hidden = self.token(x) + self.position(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(hidden)))


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@torch.no_grad()
def evaluate(model, loader, check_stop):
    model.eval()
    losses = []
    for batch in islice(loader, 4):
        losses.append(loss_of(model, batch))
        check_stop()
    model.train()
    return torch.stack(losses).mean()


@hydra.main(version_base=None, config_path=".", config_name="gpt")
def main(cfg):
    torch.manual_seed(cfg.seed)
    text = Path(__file__).read_text()
    data = Text(text, cfg.block)
    loader = DataLoader(data, cfg.batch, shuffle=True, drop_last=True)
    held_out = DataLoader(data, cfg.batch, shuffle=True, generator=torch.Generator())
    model = GPT(len(data.vocabulary), cfg)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, 0.95))

    def rate(step):
        if step < cfg.warmup:
            return (step + 1) / cfg.warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * step / cfg.steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    with forge.Run(cfg.resilience, model=model, optimizer=optimizer, schedule=schedule) as run:

        @run.every(cfg.eval_every)
        def score(step):
            held_out.generator.manual_seed(step)
            run.log(held_out=evaluate(model, held_out, run.check_stop))

        for _, batch in run.steps(cfg.steps, loader):
            loss = loss_of(model, batch)
            loss.backward()
            run.update(loss, optimizer, schedule, clip_norm=1.0)
            run.log(loss=loss, lr=schedule.get_last_lr()[0])


if __name__ == "__main__":
    main()
