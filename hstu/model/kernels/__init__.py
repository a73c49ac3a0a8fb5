"""Triton kernels of HSTU attention over a jagged batch.

    y_i = 1/N · Σ_j mask(i, j) · SiLU(q_i · k_j + bias(i − j) + time_bias(t_i − t_j)) · v_j        per head

Nothing is padded in memory. A program has a block of one row's tokens and one head, and visits the blocks of the other
side (keys or queries) that the mask keeps: first the blocks without masked pairs, then the others.
`hstu.model.attention` is the reference.

    forward                 a block of queries visits keys        y
    backward_key            a block of keys visits queries        gradients of k and v and, by atomic additions, of q
    backward_query          a block of queries visits keys        gradient of q
    bias_gradient           visits blocks of equal distance       gradients of the biases, except the next kernel's part
    target_bias_gradient    a block of keys visits targets        gradients of the biases, from targets on the history

ROWS `(batch_size, 4)` has the first token, length, history and context of every row; TILES `(num_tiles, 2)` has a row
and a place in it, the most work first. A tile spans TILE_SPAN tokens and is cut into the programs' blocks. On compute
capability 9.0 and above visited blocks are loaded by tensor descriptors (TMA): a block that extends beyond its row then
contains tokens of the next row, which the mask hides.
"""
