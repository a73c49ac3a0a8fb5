"""The semantic-ID decoder: tokens, attention over packed rows, megatron-core's layers, heads, generation.

The flow of a batch, and the file of each step:

    embeddings ─► token_layout.py ─► decoder.py (attention.py in each layer) ─► loss
                                        │ keys and values of histories
                                        └► gpt.py, beam_search.py, trie.py ─► items
"""

from sid_gr.model.config import SIDGRConfig
from sid_gr.model.decoder import LossOutput, SIDDecoder
from sid_gr.model.gpt import GenerationOutput, SIDGRModel
from sid_gr.model.trie import SIDTrie

__all__ = ["GenerationOutput", "LossOutput", "SIDDecoder", "SIDGRConfig", "SIDGRModel", "SIDTrie"]
