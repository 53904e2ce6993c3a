"""An H200 with NVLink to all peers, as measured on 2, 4 and 8 of them.

All strategies read `H200`. Each rate below it is for one way to compute: what a kernel reaches
beside others, how long it takes to start. Links are bytes per second of one rank.
"""

from dataclasses import replace

from shardmath.machine.rates import Rates

H200 = Rates(
    products={
        "float64": 6e13,
        "float32": 5e13,
        "float16": 7.5e14,
        "bfloat16": 7.5e14,
        "float8": 1.2e15,
        "complex64": 1.2e13,
        "complex128": 1.5e13,
    },
    transforms=1e13,
    memory=4e12,
    strided=4e12,
    link=3.4e11,
    latency=1e-5,
    gathering=2.7e-5,
    finishing=2e-5,
    panel=768,
    room=6e10,
)
# The same on several hosts, with a network card of 400 Gb/s for each GPU.
H200_MULTI_HOST = replace(H200, link=4.5e10, latency=4e-5, gathering=6e-5, finishing=5e-5)

PROCESSORS = 132
CLOCK = 1.75e9  # cycles per second

# Products, by themselves.
HALF_PRODUCT = 7.8e14  # operations per second of a large one of 16-bit floats, by cuBLAS
FUSED_PRODUCT = 8e14  # the same, by a kernel of ours that waits for nothing
FLOAT8_PRODUCT = 1.3e15
READING = 3.6e12  # bytes per second with which a product reads its operands
PRODUCT_START = 3e-6  # seconds until it has begun
PANEL = 6e-6  # seconds for starting one more product, and for ending it with few tiles
TILE = 1.5e-6  # seconds of a tile in addition to its operations

# Links, by what they carry.
SCATTERED = 2.9e11  # a reduce-scatter, or tiles beside a product
SHARED = 3.1e11  # an all-reduce
MIXED = 2.7e11  # tiles and sums beside a product
BURST = 3.45e11  # tiles that all multiprocessors send at once
GATHERED = 3.2e11  # an all-gather by a kernel, before a product
PUSHED = 3.3e11  # what a kernel writes into peers' memory
ENGINE = 3.7e11  # a copy engine
BESIDE = 1.2e12  # of sums that are sent: the time that the product beside them loses
COPIED = 2.1e12  # of sums that are copied to the result, in memory

# Seconds until something begins.
KERNEL_START = 5e-6  # until a kernel has started and sees what peers do
GRAPH_STEP = 1.5e-6  # from one kernel of a graph to the next
COLLECTIVE = 4.5e-6  # a collective of a few bytes
BARRIER = 4e-6
COPY_START, PUSH_START = 3e-6, 5e-6
ENGINES_START = 1.2e-5  # until an engine's first copy begins, and a kernel after the last
ENGINES_MET = 1.9e-5  # the same where a kernel first looks whether peers have read
ENGINE_COPY = 6e-6  # each further copy in addition to its bytes, with the words behind it
GATHER_START = 1e-5  # two barriers, and a kernel that pushes
PLAN_CALL = 4e-6  # of the host, for one call of a plan of cuFFT
