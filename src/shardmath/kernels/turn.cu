// Numbers multiplied by complex factors along an axis, before and after the Fourier transform that stands behind
// one of cosines or sines: real numbers become complex ones, with zeros behind them, and complex numbers the
// real parts of the products. Compiled with SOURCE, TARGET and FACTOR, types of elements.cuh: the last is the
// complex one of the others.
#include "strided.cuh"

using namespace shardmath;

struct TurnArgument {
    Strided arrays;
    const FACTOR* factors;
    uint64 axis, length;  // the dimension, and how many numbers of the source it has
};

template <class Element, class Real>
__device__ void turn_into(complex_of<Real>& target, const Element& x, complex_of<Real> factor) {
    const Real wide = (Real)Wide<Element>::widen(x);
    target = {wide * factor.real, wide * factor.imag};
}
template <class Real>
__device__ void turn_into(Real& target, const complex_of<Real>& x, complex_of<Real> factor) {
    target = x.real * factor.real - x.imag * factor.imag;
}

extern "C" __global__ void __launch_bounds__(256) turn(const __grid_constant__ TurnArgument a) {
    const uint64 stride = (uint64)gridDim.x * blockDim.x;
    for (uint64 i = (uint64)blockIdx.x * blockDim.x + threadIdx.x; i < a.arrays.count; i += stride) {
        const Places at = a.arrays.places(i, a.axis);
        TARGET made = {};
        if (at.index < a.length)
            turn_into(made, *(const SOURCE*)(a.arrays.source + at.source), a.factors[at.index]);
        *(TARGET*)(a.arrays.target + at.target) = made;
    }
}
