"""Fast steps of few rows on CPUs.

`linear` packs weights for the library's products, and `fused` merges the operations of a layer. `row_math` and
`row_attention` are compiled loops between products. With vectors of 512 bits a whole step is one compiled loop:
`row_decoder` prepares it, `row_phases` is the loop, `row_products` and `tiles` are its products, and `thread_pool`
has the threads that share it.
"""
