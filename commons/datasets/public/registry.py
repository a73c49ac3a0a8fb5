"""The public data sets by name.

To add one: describe it as a `PublicDataset` and add it to `PUBLIC_DATASETS`.
"""

from __future__ import annotations

from commons.datasets.public.dataset import PublicDataset
from commons.datasets.public.kuairand import VERSIONS
from commons.datasets.public.movielens import ML_1M, ML_20M

PUBLIC_DATASETS: dict[str, PublicDataset] = {"ml-1m": ML_1M, "ml-20m": ML_20M, **VERSIONS}
