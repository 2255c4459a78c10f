"""Models and their optimizers, saved and read straight back into them."""

import torch
from torch import nn

from forge.state import restoring
from forge.state.registry import StateRegistry


def adam(module, num_steps=1):
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(num_steps):
        for parameter in module.parameters():
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def pair(seed, num_steps=1):
    """A model of about 20 KiB and its AdamW."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 10))
    return StateRegistry({"model": model, "optimizer": adam(model, num_steps)})


def save(store, live, step=1, **more):
    state = {"live": live.capture(), **more}
    return store.commit(store.snapshot(step, state, copy=True))


def newest(store, live):
    return store.newest(offer=lambda state: restoring.in_place_targets(live, state["live"]))


def resume(store, live):
    found = newest(store, live)
    restoring.load(live, found.state["live"], found.fill())


def tensors_of(value):
    """Every tensor in a tree, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_of(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_of(one)


def content(live):
    return [bits(t) for t in tensors_of(live.capture())]


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if plain.is_complex():
        plain = torch.view_as_real(plain).contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), plain.view(torch.uint8).numpy().tobytes()


def aliases(live):
    """Which tensors share their memory with which."""
    addresses = [t.data_ptr() for t in tensors_of(live.capture())]
    return [addresses.index(address) if address else -1 for address in addresses]
