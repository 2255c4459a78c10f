"""Cross-validation: a named run for each fold, one after the other, scored by what was held out."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import forge

NUM_FOLDS = 3


def main():
    torch.manual_seed(0)
    x = torch.randn(90, 5)
    data = TensorDataset(x, (x[:, :2].prod(1, keepdim=True) > 0).float())
    folds = torch.randperm(len(data)).chunk(NUM_FOLDS)
    scores = []
    for number, held_out in enumerate(folds):
        rest = torch.cat([fold for other, fold in enumerate(folds) if other != number])
        loader = DataLoader(Subset(data, rest.tolist()), 10, shuffle=True)
        model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        optimizer = torch.optim.RAdam(model.parameters(), lr=0.02)
        policy = {"checkpoint": {"every_steps": 7}}
        with forge.Run(policy, name=f"fold{number}", model=model, optimizer=optimizer) as run:
            for _, (inputs, labels) in run.steps(25, loader):
                loss = nn.functional.binary_cross_entropy_with_logits(model(inputs), labels)
                loss.backward()
                run.update(loss, optimizer)
                run.log(loss=loss)
            with torch.no_grad():
                inputs, labels = data[held_out]
                scores.append(((model.eval()(inputs) > 0) == labels).float().mean())
            run.log(score=scores[-1])
    print(f"accuracy {torch.stack(scores).mean():.3f}")


if __name__ == "__main__":
    main()
