// A matrix as a kernel is given it: see local/gpu/matrix.py. Its rows and columns are told otherwise.
#pragma once

namespace shardmath {

typedef long long i64;

struct Matrix {
    void* data;
    i64 row, column;  // strides in elements
};

}  // namespace shardmath
