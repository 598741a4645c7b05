"""The engine of GPUs: steps of few shapes over buffers that never move, so that each can be a CUDA graph.

The numbered flow of a step:

1. `packing.py` turns the plan into one array of integers, padded to a bucket (`buckets.py`, `layout.py`).
2. `static_engine.py` uploads it and runs the forward pass as a function of that buffer alone: attention over
   the pages of each session (`pages.py`, `attention.py`), then the race of the rows that are to be drawn
   (`noise.py`, and under top-k, top-p or min-p `filters.py`). Hidden states that sessions of the step read are
   copied into the same static buffers; which layers belongs to the step's shape. `graphs.py` captures and
   replays it; nothing else depends on CUDA.
3. What comes back, in one synchronisation, is a handful of candidates a row, and the logits that were asked for.
4. `candidates.py` decides among the candidates on the host, by the one definition in `paceline.sampling.noise`.
"""
