"""Of several texts that were sampled for a label, those that a public encoder takes for it by the label's name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from common.labelled_texts import Texts

# Of the softmax over labels, whose differences of cosines are small.
_TEMPERATURE = 0.1


def best_draws(
    drawn: Texts, wanted: Sequence[int], names: Sequence[str], features: Callable[[Sequence[str]], Tensor]
) -> Texts:
    """As many texts of each label as are wanted: those whose label is the likeliest, in the order they have; the same
    words twice only where there are no others.

    It is chosen by the texts that were sampled and by what is public, so the model's guarantee holds for what is left.

    Args:
        wanted: of each label, at most as many as were drawn.
        features: (texts, features) of texts, by an encoder that no private text had a part in.
    """
    known = features([name.replace("_", " ") for name in names])
    origin = known.mean(0)
    cosines = F.normalize(features(drawn.texts) - origin, dim=1) @ F.normalize(known - origin, dim=1).T
    likely = (cosines / _TEMPERATURE).log_softmax(1)
    kept: list[int] = []
    for label, count in enumerate(wanted):
        of_label = [i for i, one in enumerate(drawn.labels) if one == label]
        said = Counter[str]()
        order = []
        for i in sorted(of_label, key=lambda i: -float(likely[i, label])):
            order.append((said[drawn.texts[i]], len(order), i))
            said[drawn.texts[i]] += 1
        kept += [i for *_, i in sorted(order)[:count]]
    kept.sort()
    return Texts([drawn.texts[i] for i in kept], [drawn.labels[i] for i in kept])
