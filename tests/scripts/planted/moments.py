"""The running mean of the inputs, for `normalised.py`."""

mean = None


def centred(x, momentum=0.1):
    """Less the mean of what was seen so far."""
    global mean
    now = x.mean(0)
    mean = now if mean is None else (1 - momentum) * mean + momentum * now
    return x - mean
