"""The HSTU model: tokens, attention over jagged rows, layers, and the heads and losses for ranking and retrieval.

The flow of a batch, and the file of each step:

    embeddings ─► tokens.py ─► attention_plan.py ─► layer.py (attention.py in each layer) ─┬► ranking.py ─► loss
                  └──────────────── sequence_model.py puts them together ────────────────┘ └► retrieval.py ─► loss
"""

from hstu.model.attention import TokenTimes, hstu_attention
from hstu.model.attention_plan import AttentionPlan, plan_attention
from hstu.model.config import ExecutionConfig, HSTUConfig, RankingConfig, RetrievalConfig
from hstu.model.layer import HSTUEncoder, HSTULayer
from hstu.model.ranking import HSTURankingModel, RankingOutput, RankingTower
from hstu.model.retrieval import HSTURetrievalModel, RetrievalOutput, RetrievalTower
from hstu.model.sequence_model import SequenceModel, SequenceTower
from hstu.model.tokens import TokenSequence, interleave_tokens

__all__ = [
    "AttentionPlan",
    "ExecutionConfig",
    "HSTUConfig",
    "HSTUEncoder",
    "HSTULayer",
    "HSTURankingModel",
    "HSTURetrievalModel",
    "RankingConfig",
    "RankingOutput",
    "RankingTower",
    "RetrievalConfig",
    "RetrievalOutput",
    "RetrievalTower",
    "SequenceModel",
    "SequenceTower",
    "TokenSequence",
    "TokenTimes",
    "hstu_attention",
    "interleave_tokens",
    "plan_attention",
]
