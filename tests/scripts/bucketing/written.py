"""Train a small recurrent classifier on sequences batched by similar length."""

import hydra
import torch
from hydra.core.config_store import ConfigStore
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler

import forge

EPOCHS, BATCH = 5, 16

ConfigStore.instance().store("config", {"defaults": [{"resilience": "default"}, "_self_"]})


class BucketSampler(Sampler):
    def __init__(self, lengths, generator):
        self.lengths, self.generator = lengths, generator

    def __iter__(self):
        noise = 2 * torch.rand(len(self.lengths), generator=self.generator)
        order = (self.lengths + noise).argsort().split(BATCH)
        for index in torch.randperm(len(order), generator=self.generator).tolist():
            yield order[index].tolist()

    def __len__(self):
        return -(-len(self.lengths) // BATCH)


def collate(items):
    texts, labels = zip(*items)
    return pad_sequence(texts, batch_first=True), torch.tensor(labels)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru = nn.Embedding(12, 16, padding_idx=0), nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        return self.head(self.gru(self.embed(x))[0].mean(1))


@hydra.main(version_base=None, config_name="config")
def main(cfg):
    torch.manual_seed(0)
    lengths = torch.randint(4, 25, (256,))
    texts = [torch.randint(1, 12, (length,)) for length in lengths.tolist()]
    data = [(text, int(text.float().mean() > 6)) for text in texts]
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(data, batch_sampler=BucketSampler(lengths, generator), collate_fn=collate)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    with forge.Run(cfg.resilience, model=model, optimizer=optimizer, schedule=schedule) as run:
        run.state.generator = generator
        for _ in run.epochs(EPOCHS):
            for x, y in run.batches(loader):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                run.update(loss, optimizer, schedule, clip_norm=1.0)
                run.log(loss=loss)


if __name__ == "__main__":
    main()
