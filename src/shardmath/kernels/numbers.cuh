// Arithmetic of factorisations, of real and complex elements.
#pragma once

#include "elements.cuh"

namespace shardmath {

template <class Real>
__device__ inline bool is_zero(Real x) {
    return x == 0;
}
template <class Real>
__device__ inline bool is_zero(complex_of<Real> x) {
    return x.real == 0 && x.imag == 0;
}

template <class Real>
__device__ inline Real conjugate_of(Real x) {
    return x;
}
template <class Real>
__device__ inline complex_of<Real> conjugate_of(complex_of<Real> x) {
    return {x.real, -x.imag};
}

// How large a pivot an element would be, as LAPACK's amax has it. A NaN is none.
template <class Real>
__device__ inline float64 size_of(Real x) {
    return x < 0 ? -x : x == x ? x : 0;
}
template <class Real>
__device__ inline float64 size_of(complex_of<Real> x) {
    const Real size = (x.real < 0 ? -x.real : x.real) + (x.imag < 0 ? -x.imag : x.imag);
    return size == size ? size : 0;
}

template <class Real>
__device__ inline Real quotient(Real x, Real y) {
    return x / y;
}
template <class Real>
__device__ inline complex_of<Real> quotient(complex_of<Real> x, complex_of<Real> y) {  // Smith's
    if (size_of(y.real) >= size_of(y.imag)) {
        const Real ratio = y.imag / y.real, scale = y.real + y.imag * ratio;
        return {(x.real + x.imag * ratio) / scale, (x.imag - x.real * ratio) / scale};
    }
    const Real ratio = y.real / y.imag, scale = y.imag + y.real * ratio;
    return {(x.real * ratio + x.imag) / scale, (x.imag * ratio - x.real) / scale};
}

// c - a b
template <class Real>
__device__ inline Real minus_product(Real c, Real a, Real b) {
    return c - a * b;
}
template <class Real>
__device__ inline complex_of<Real> minus_product(complex_of<Real> c, complex_of<Real> a, complex_of<Real> b) {
    return {c.real - a.real * b.real + a.imag * b.imag, c.imag - a.real * b.imag - a.imag * b.real};
}

}  // namespace shardmath
