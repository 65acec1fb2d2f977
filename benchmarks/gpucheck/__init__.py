"""What `benchmarks/gpu.py` is made of: three calls on a CUDA device, each of which stands alone.

`plan` lists every row of every call; `battery` is the process that starts others, `child` such a
process, which measures a group of rows; `record` the file that both write. On a CPU the same code
runs at tiny sizes over the doubles of `machine`.
"""
