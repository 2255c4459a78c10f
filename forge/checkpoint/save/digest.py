"""Whether two ranks have the same tensor, by 16 bytes: at the speed of memory, or near it.

A cryptographic hash takes longer than the disk. Instead a CRC-32 of the bytes goes into a short
hash, and for each block two sums of words with random weights, modulo 2**64; the words of the
second begin four bytes later, so that each four bytes are the lower half of a word in one of them.
Whatever two tensors differ in, the CRC and the sums overlook it by a chance of 2**-32 each.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib

import torch

from forge.checkpoint.format.checksums import crc32
from forge.checkpoint.io.copying import flat

_BLOCK = 1 << 16
"""Words of 8 bytes: their weights stay in the processor's cache."""

_SMALL = 1 << 14
"""Bytes that a cryptographic hash reads as fast."""


def digest(tensor: torch.Tensor) -> str:
    """A digest of a tensor's values, dtype and shape."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    found = hashlib.blake2b(f"{plain.dtype}{list(plain.shape)}".encode(), digest_size=16)
    if plain.numel():
        memory = flat(plain)
        data = (ctypes.c_char * len(memory)).from_address(memory.data_ptr())
        if len(memory) < _SMALL:
            found.update(data)
        else:
            found.update(crc32(data).to_bytes(4, "little"))
            for weights, skipped in zip(_weights(), (0, 4), strict=True):
                found.update(_sums(data, skipped, weights))
            found.update(ctypes.string_at(memory.data_ptr() + len(memory) - 16, 16))
    return found.hexdigest()


def _sums(data: ctypes.Array[ctypes.c_char], skipped: int, weights: torch.Tensor) -> bytes:
    """The weighted sum of each block, of words of 8 bytes from there on."""
    count = (len(data) - skipped) // 8
    words = torch.frombuffer(data, dtype=torch.int64, count=count, offset=skipped)
    blocks = [words[at : at + _BLOCK] for at in range(0, count, _BLOCK)]
    sums = [torch.dot(block, weights[: len(block)]) for block in blocks]
    return b"".join(int(one).to_bytes(8, "little", signed=True) for one in sums)


@functools.cache
def _weights() -> torch.Tensor:
    """The same on all ranks: int64, shape [2, _BLOCK]."""
    generator = torch.Generator(device="cpu").manual_seed(0x5EED)
    return torch.randint(-(2**63), 2**63 - 1, (2, _BLOCK), generator=generator, device="cpu")
