"""Code of the fastai tests, run on the ranks and in a single process: small data whose sizes do not divide."""

from __future__ import annotations

DATA = '''
import numpy as np, torch
from fastai.basics import *
from fastai.callback.all import *
from fastai.metrics import *

class Items:
    """Points of three classes; asked for an item, it writes down which."""
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.y = torch.tensor(rng.integers(0, 3, n))
        self.x = torch.tensor(rng.normal(size=(n, 6)), dtype=torch.float32) + self.y[:, None]
        self.items = list(range(n))
        self.asked = []
    def new_empty(self):
        return Items(0, 0)
    def __len__(self):
        return len(self.y)
    def __getitem__(self, i):
        self.asked.append(int(i))
        return self.x[i], self.y[i]

def loaders(n=101, n_valid=37, bs=8, shuffle=False, drop_last=False, num_workers=0, valid_bs=8):
    train, valid = Items(n, 1), Items(n_valid, 2)
    return DataLoaders(
        DataLoader(train, bs=bs, shuffle=shuffle, drop_last=drop_last, num_workers=num_workers),
        DataLoader(valid, bs=valid_bs), device=torch.device("cpu"))

class RightOnes(Metric):
    """A user's own metric, with a state that nobody else knows; the second batch counts twice."""
    def reset(self):
        self.seen = []
    def accumulate(self, learn):
        right = (learn.pred.argmax(1) == learn.y).float().mean().item()
        self.seen += [right] * (2 if len(self.seen) == 1 else 1)
    @property
    def value(self):
        return sum(self.seen) / len(self.seen)
    @property
    def name(self):
        return "right_ones"

def model(norm=False):
    layers = [nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)]
    return nn.Sequential(layers[0], nn.BatchNorm1d(16), *layers[1:]) if norm else nn.Sequential(*layers)

def learner(dls=None, norm=False, **kwargs):
    metrics = [accuracy, F1Score(average="macro"), RightOnes()]
    kwargs = {"loss_func": CrossEntropyLossFlat(), "metrics": metrics, **kwargs}
    return Learner(loaders() if dls is None else dls, model(norm), **kwargs)

def weights(learn):
    return [t.detach().clone() for t in learn.model.state_dict().values()]
'''
