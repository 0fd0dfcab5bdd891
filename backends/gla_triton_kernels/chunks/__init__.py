"""Holds what kernels of any op with a recurrent state share.

kernel.py               a kernel as a value, and the plans that consist of kernels
cutting.py price.py     the length of segments, and whether a cut saves time; predicted seconds of a kernel
segments.py scan.py     segments of sequences, packed ones too, and the scan of their states
entering.py             both in order: the states that enter segments
slots.py                states in a pool
partials.py             sums of partial results
padding.py widths.py    rows of no sequence; copies to wider heads
results.py              memory of results, and those that no kernel writes
"""
