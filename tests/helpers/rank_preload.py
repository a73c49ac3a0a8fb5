"""What the fork server imports once for all ranks."""

import warnings

warnings.filterwarnings("ignore")

import torch
import torch.distributed
import torchrec
import torchrec.distributed.model_parallel
import torchrec.distributed.planner
import torchrec.distributed.train_pipeline  # noqa: F401

torch.set_num_threads(1)
