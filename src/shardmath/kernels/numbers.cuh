// Real and complex numbers of two precisions. Includes nothing.
#pragma once

namespace shardmath {

typedef float float32;
typedef double float64;
template <class Real>
struct complex_of {
    Real real, imag;
};
typedef complex_of<float> complex64;
typedef complex_of<double> complex128;

template <class Real>
__device__ inline Real conjugate_of(Real x) {
    return x;
}
template <class Real>
__device__ inline complex_of<Real> conjugate_of(complex_of<Real> x) {
    return {x.real, -x.imag};
}

}  // namespace shardmath
