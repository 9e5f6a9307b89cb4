/* vector.h: asks the compiler to make vector code of loops. Comes before any function is
 * defined.
 *
 * Invariant: nothing here changes a result. Selections between values already computed become
 * vector blends only when no code watches floating-point traps and errno, which none does;
 * functions compiled under different options are not inlined into each other, hence one place
 * for them.
 */
#ifndef ORR_VECTOR_H
#define ORR_VECTOR_H

#if defined(__GNUC__) && !defined(__clang__) && !defined(__cplusplus)
#pragma GCC optimize("no-math-errno", "no-trapping-math")
#endif

/* Says that the iterations of the next loop do not depend on each other; outputs may be inputs.
 */
#if defined(_OPENMP)
#define ORR_SIMD _Pragma("omp simd")
#elif defined(__GNUC__) && !defined(__clang__)
#define ORR_SIMD _Pragma("GCC ivdep")
#else
#define ORR_SIMD
#endif

/* A function of numbers, for the CPU and for the device alike. */
#ifdef __CUDACC__
#define ORR_SCALAR static inline __host__ __device__
#else
#define ORR_SCALAR static inline
#endif

#endif
