// Real and complex numbers of two precisions, and their arithmetic. Includes nothing.
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

template <class Real>
__device__ inline Real times(Real x, Real y) {
    return x * y;
}
template <class Real>
__device__ inline complex_of<Real> times(complex_of<Real> x, complex_of<Real> y) {
    return {x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real};
}

// x - y z
template <class Real>
__device__ inline Real minus_product(Real x, Real y, Real z) {
    return x - y * z;
}
template <class Real>
__device__ inline complex_of<Real> minus_product(complex_of<Real> x, complex_of<Real> y, complex_of<Real> z) {
    return {x.real - y.real * z.real + y.imag * z.imag, x.imag - y.real * z.imag - y.imag * z.real};
}

// 1 / x; of complex numbers by Smith's method, without overflow in between.
template <class Real>
__device__ inline Real inverse_of(Real x) {
    return 1 / x;
}
template <class Real>
__device__ inline complex_of<Real> inverse_of(complex_of<Real> x) {
    const bool is_real = (x.real < 0 ? -x.real : x.real) >= (x.imag < 0 ? -x.imag : x.imag);  // mainly
    const Real ratio = is_real ? x.imag / x.real : x.real / x.imag;
    const Real whole = is_real ? x.real + x.imag * ratio : x.real * ratio + x.imag;
    return is_real ? complex_of<Real>{1 / whole, -ratio / whole} : complex_of<Real>{ratio / whole, -1 / whole};
}

}  // namespace shardmath
