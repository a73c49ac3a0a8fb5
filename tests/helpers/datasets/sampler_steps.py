"""Batches of samplers, step by step."""

from commons.datasets.samplers.epoch import EPOCH_START


def steps_of(samplers, epoch, start=EPOCH_START):
    """Rows of every step on every rank: as many batches on each, none of them empty."""
    batches = []
    for sampler in samplers:
        sampler.set_epoch(epoch)
        sampler.start_at(*start)
        batches.append(list(sampler))
    assert len(set(map(len, batches))) == 1 and all(row for own in batches for row in own)
    return [list(step) for step in zip(*batches)]
