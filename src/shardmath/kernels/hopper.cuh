// The instructions of compute capability 9.0a that a product is made of: barriers in shared memory, bulk and
// tensor copies, and products by groups of four warps. Includes nothing; compile for sm_90a.
#pragma once

namespace shardmath {

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {  // what cuTensorMapEncodeTiled makes
    char opaque[128];
};

__device__ inline u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// -- barriers in shared memory -------------------------------------------------------------------------

__device__ inline void mbarrier_init(u32 bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}
__device__ inline void mbarrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ inline void mbarrier_expect_tx(u32 bar, u32 nbytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(nbytes) : "memory");
}
// Until the phase of that parity is over.
__device__ inline void mbarrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n\t.reg .pred over;\n\tagain:\n\tmbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n\t"
        "@!over bra again;\n\t}" ::"r"(bar),
        "r"(parity)
        : "memory");
}
__device__ inline void fence_mbarrier_init() {  // to the copies, after mbarrier_init
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}

// A word in shared memory by which one thread tells another what it has seen.
__device__ inline void tell(u32 word, u32 value) {
    asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(word), "r"(value) : "memory");
}
__device__ inline u32 told(u32 word) {
    u32 value;
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(value) : "r"(word) : "memory");
    return value;
}

// -- copies --------------------------------------------------------------------------------------------

// The box of a matrix whose first element is (x along the contiguous axis, y): zeros beyond its edges.
__device__ inline void tma_load(u32 to, const TensorMap* from, u32 x, u32 y, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(to),
        "l"(from), "r"(x), "r"(y), "r"(bar)
        : "memory");
}
__device__ inline void bulk_store(void* to, u32 from, u32 nbytes) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n\tcp.async.bulk.commit_group;" ::"l"(to),
        "r"(from), "r"(nbytes)
        : "memory");
}
__device__ inline void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
template <int kOthers>
__device__ inline void bulk_wait_read_but() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kOthers) : "memory");
}
__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ inline void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit elements from the registers of a warp; lane l names row l % 8 of matrix l / 8.
__device__ inline void stmatrix_x4(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

// -- registers and products ----------------------------------------------------------------------------

template <int kCount>
__device__ inline void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// An operand in shared memory that was loaded in boxes whose rows are 128 bytes, swizzled. With `kAlongK` the
// rows run along k: 8 of them are 1024 bytes on. Otherwise they run along m or n, 64 elements each, one row
// for each k; the next 64 elements lie `box` bytes on.
template <bool kAlongK>
__device__ inline u64 wgmma_descriptor(u32 address, u32 box) {
    const u64 leading = kAlongK ? 1 : box >> 4;
    return (u64)((address & 0x3FFFF) >> 4) | leading << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define SHARDMATH_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SHARDMATH_F16(i) SHARDMATH_F4(i), SHARDMATH_F4(i + 4), SHARDMATH_F4(i + 8), SHARDMATH_F4(i + 12)
#define SHARDMATH_WGMMA(TYPE)                                                                                  \
    asm volatile(                                                                                              \
        "{\n\t.reg .pred keep;\n\tsetp.ne.b32 keep, %130, 0;\n\t"                                              \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {"                                      \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                               \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                     \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                     \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                     \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                     \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                     \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "         \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "    \
        "%128, %129, keep, 1, 1, %131, %132;\n\t}"                                                             \
        : SHARDMATH_F16(0), SHARDMATH_F16(16), SHARDMATH_F16(32), SHARDMATH_F16(48), SHARDMATH_F16(64),        \
          SHARDMATH_F16(80), SHARDMATH_F16(96), SHARDMATH_F16(112)                                             \
        : "l"(a), "l"(b), "r"(keep), "n"(kAAlongK ? 0 : 1), "n"(kBAlongK ? 0 : 1))

struct Float16 {
    template <bool kAAlongK, bool kBAlongK>
    static __device__ void multiply(float (&d)[128], u64 a, u64 b, u32 keep) {
        SHARDMATH_WGMMA("f16");
    }
    static __device__ u32 pack(float low, float high) {
        u32 both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
};
struct Bfloat16 {
    template <bool kAAlongK, bool kBAlongK>
    static __device__ void multiply(float (&d)[128], u64 a, u64 b, u32 keep) {
        SHARDMATH_WGMMA("bf16");
    }
    static __device__ u32 pack(float low, float high) {
        u32 both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
};
#undef SHARDMATH_WGMMA
#undef SHARDMATH_F16
#undef SHARDMATH_F4

}  // namespace shardmath
