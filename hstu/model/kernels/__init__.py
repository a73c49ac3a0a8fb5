"""Triton kernels of HSTU attention over a jagged batch.

    y_i = 1/N · Σ_j mask(i, j) · SiLU(q_i · k_j + bias(i − j) + time_bias(t_i − t_j)) · v_j        per head

Nothing is padded in memory: a program takes one tile of a row's tokens and one head, and visits the blocks on the other
side that the mask leaves, those that need no mask first. `hstu.model.attention` is the reference.

    forward                 a tile of queries visits keys         y
    backward_key            a tile of keys visits queries         the gradients of k and v and, added up in memory, of q
    backward_query          a tile of queries visits keys         the gradient of q
    bias_gradient           blocks of one distance, of all rows   what the history adds to the gradients of the biases
    target_bias_gradient    a block of keys visits targets        what targets on the history add to them

Rows `(batch_size, 4)` hold first token, length, history and context of every row; tiles `(num_tiles, 2)` hold a row
and a place in it, the most work first, and span TILE_SPAN tokens, from which programs cut their blocks. On compute
capability 9.0 and above what a program visits comes by tensor descriptors (TMA): a block that ends behind its row then
has tokens of the next one, which the mask hides.
"""
