"""What the fork server imports once for all ranks, each of which starts in milliseconds then."""

import importlib
import warnings

import torch

warnings.filterwarnings("ignore")
for name in ("torchrec.distributed.train_pipeline", "hstu.recipe", "sid_gr.recipe"):
    importlib.import_module(name)
torch.set_num_threads(1)
