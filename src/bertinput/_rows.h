/* One row: the sum of up to three table rows, its LayerNorm, its rounding.
 *
 * The bodies stand in _rows_body.h, which is included once for each instruction set; a table of
 * function pointers for each (instruction set, type of computation) is chosen once at import.
 * Everything is static: the linker must never merge a body for one instruction set into another.
 *
 * Same bits everywhere: no contraction (-ffp-contract=off), no fast-math, a fused multiply-add only
 * where it is written, and reductions in a fixed number of lanes and a fixed tree, whatever the
 * vector width.
 */
#ifndef BERTINPUT_ROWS_H
#define BERTINPUT_ROWS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(_MSC_VER) && !defined(__clang__)
#define BI_INLINE static __forceinline
#define BI_APART __declspec(noinline)
#define BI_LINE __declspec(align(64))
#define BI_UNALIGNED(type, name) typedef __unaligned type name
#define BI_RESTRICT __restrict
#pragma fp_contract(off)
#else
#define BI_INLINE static inline __attribute__((always_inline))
#define BI_APART __attribute__((noinline))
#define BI_LINE __attribute__((aligned(64)))
/* rows may start at any byte (memory maps, structured arrays) */
#define BI_UNALIGNED(type, name) typedef type name __attribute__((aligned(1), may_alias))
#define BI_RESTRICT restrict
#endif

/* the stores of the loop that follows do not change what it reads */
#if defined(__clang__)
#define BI_NO_ALIAS _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define BI_NO_ALIAS _Pragma("GCC ivdep")
#else
#define BI_NO_ALIAS __pragma(loop(ivdep))
#endif

typedef float bi_f32;
typedef double bi_f64;
BI_UNALIGNED(float, bi_f32u);
BI_UNALIGNED(double, bi_f64u);
BI_UNALIGNED(uint16_t, bi_u16u);

/* types of tables; the first four are types of results too */
enum { BI_F64, BI_F32, BI_F16, BI_BF16, BI_I8, BI_U8, BI_TABLE_TYPES };
enum { BI_RESULT_TYPES = BI_BF16 + 1 };

#define BI_MAX_TERMS 3

/* one row of a table; scale and zero serve quantized tables alone */
typedef struct {
    const char *at;
    float scale;
    int32_t zero;
} bi_row;

/* the sum of a row's elements, and of their squares */
typedef struct {
    double first, second;
} bi_moments;

/* LayerNorm's vectors, of the computation's type */
typedef struct {
    const void *weight, *bias;
    double eps;
} bi_norm_vectors;

/* rows that are normalised together: while one waits for its square root, the others go on */
#define BI_NORM_ROWS 4

/* acc[i] = rows[0][i] + rows[1][i] + ..., left to right, or acc[i] += rows[0][i];
 * the moments of the result, unless they are NULL, or `stream`: past the caches */
typedef void (*bi_fold)(void *acc, const bi_row *rows, int64_t width, bi_moments *moments,
                        int stream);
/* out = LayerNorm(acc) for up to BI_NORM_ROWS rows, so many bytes apart; no overlap; `stream` as
 * above */
typedef void (*bi_norm)(const char *acc, int64_t acc_step, const bi_moments *moments, int64_t rows,
                        int64_t width, const bi_norm_vectors *vectors, char *out,
                        int64_t out_step, int stream);
/* out[i] = acc[i], rounded once to the type of the result */
typedef void (*bi_round)(const void *acc, void *out, int64_t width);

typedef struct {
    bi_fold fold[BI_MAX_TERMS][BI_TABLE_TYPES]; /* 1, 2 or 3 rows of one table type */
    bi_fold add[BI_TABLE_TYPES];
    bi_norm norm;
    bi_round round[BI_RESULT_TYPES]; /* NULL: the computation's own type */
} bi_kernels;

/* ---- conversions: branch-free selects, so that loops over them vectorise ---- */

BI_INLINE float bi_f32_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

BI_INLINE uint32_t bi_bits_of_f32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

BI_INLINE float bi_from_f16(uint16_t half) {
    uint32_t magnitude = half & 0x7fffu, sign = (uint32_t)(half & 0x8000u) << 16;
    /* move the exponent's bias from 15 to 127; infinity and NaN once more, to 255 */
    uint32_t bits = (magnitude << 13) + (112u << 23);
    bits += magnitude >= 0x7c00u ? 112u << 23 : 0;
    /* subnormals through an integer conversion: exact, and no subnormal float32 on the way */
    uint32_t tiny = bi_bits_of_f32((float)(int32_t)magnitude * 0x1p-24f);
    return bi_f32_of_bits((magnitude < 0x400u ? tiny : bits) | sign);
}

BI_INLINE float bi_from_bf16(uint16_t bits) {
    return bi_f32_of_bits((uint32_t)bits << 16);
}

BI_INLINE uint16_t bi_to_f16(float value) { /* to nearest even */
    uint32_t bits = bi_bits_of_f32(value), sign = (bits >> 16) & 0x8000u;
    bits &= 0x7fffffffu;
    uint32_t normal = (bits + 0xfffu + ((bits >> 13) & 1u) - (112u << 23)) >> 13;
    /* below 2**-14: adding 0.5 leaves the subnormal, rounded, in the low bits */
    uint32_t tiny = bi_bits_of_f32(bi_f32_of_bits(bits) + 0.5f) - 0x3f000000u;
    uint32_t special = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t half = bits < 0x38800000u ? tiny : normal;
    half = bits >= 0x47800000u ? special : half;
    return (uint16_t)(half | sign);
}

BI_INLINE uint16_t bi_to_bf16(float value) { /* to nearest even */
    uint32_t bits = bi_bits_of_f32(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t nan = (bits >> 16) | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

/* float64 to float32, to odd: a later rounding to a narrower type is then a single rounding
 * (Boldo and Melquiond, "When double rounding is odd", 2005; 24 bits >= 11 + 2). */
BI_INLINE float bi_to_odd(double value) {
    float nearest = (float)value;
    uint32_t bits = bi_bits_of_f32(nearest);
    uint32_t away = fabs((double)nearest) > fabs(value);
    uint32_t odd = (bits - away) | 1u;
    return bi_f32_of_bits((double)nearest != value ? odd : bits);
}

/* A fused multiply-add, rounded once as IEEE 754 says, where no instruction does it: the product
 * is exact in float64, and the sum is rounded to odd there, for which its error must be known
 * (Moller and Knuth's TwoSum). */
BI_INLINE float bi_fma(float a, float b, float c) {
    const double product = (double)a * (double)b, addend = (double)c, sum = product + addend;
    const double part = sum - product;
    const double error = (product - (sum - part)) + (addend - part);
    uint64_t bits, rest, step;
    double odd;
    memcpy(&bits, &sum, sizeof bits);
    memcpy(&rest, &error, sizeof rest);
    /* an even sum with an error moves by one towards it: away from 0 if their signs are one */
    step = 1 - (((bits ^ rest) >> 63) << 1);
    rest &= UINT64_C(0x7fffffffffffffff);
    /* 0 < error < infinity, as two subtractions that borrow: SSE2 has no 64-bit comparison */
    step &= 0 - (((0 - rest) & (rest - UINT64_C(0x7ff0000000000000))) >> 63);
    bits += step & ((bits & 1) - 1);
    memcpy(&odd, &bits, sizeof odd);
    return (float)odd;
}

/* the i-th element of a row, exact in float32 (float64 tables: in float64) */
#define BI_LOAD_F64(row, i) (((const bi_f64u *)(row).at)[i])
#define BI_LOAD_F32(row, i) (((const bi_f32u *)(row).at)[i])
#define BI_LOAD_F16(row, i) bi_from_f16(((const bi_u16u *)(row).at)[i])
#define BI_LOAD_BF16(row, i) bi_from_bf16(((const bi_u16u *)(row).at)[i])
#define BI_LOAD_I8(row, i)                                                                         \
    ((float)((int32_t)((const int8_t *)(row).at)[i] - (row).zero) * (row).scale)
#define BI_LOAD_U8(row, i)                                                                         \
    ((float)((int32_t)((const uint8_t *)(row).at)[i] - (row).zero) * (row).scale)

/* In a block of BI_LANES elements from the i-th on, the k-th of them. What instructions decode many
 * at a time goes through an array; what needs no decoding is read where it lies. */
#define BI_AS_IT_IS(T, dtype, TERMS)
#define BI_NEXT_F64(row, k) BI_LOAD_F64(row, i + k)
#define BI_NEXT_F32(row, k) BI_LOAD_F32(row, i + k)
#define BI_DECODE_ROWS(T, dtype, TERMS)                                                            \
    BI_LINE dtype a_decoded[BI_LANES], b_decoded[BI_LANES], c_decoded[BI_LANES];                   \
    BI_ISA_NAME(decode_##T)(a_decoded, a, i);                                                      \
    if (TERMS > 1)                                                                                 \
        BI_ISA_NAME(decode_##T)(b_decoded, b, i);                                                  \
    if (TERMS > 2)                                                                                 \
        BI_ISA_NAME(decode_##T)(c_decoded, c, i);
#define BI_DECODED(row, k) row##_decoded[k]
enum { BI_BYTES_F32 = 4, BI_BYTES_F16 = 2, BI_BYTES_BF16 = 2, BI_BYTES_I8 = 1, BI_BYTES_U8 = 1 };

/* ---- the bodies, once for each instruction set ---- */

#define BI_JOIN_(a, b) a##_##b
#define BI_JOIN(a, b) BI_JOIN_(a, b)
#define BI_ISA_NAME(name) BI_JOIN(name, BI_ISA)

/* Stores past the caches, where there are such. BI_STREAM_LINE writes an aligned line of 64 bytes;
 * bi_stream_end() makes it visible to others. */
#if defined(__SSE2__) || defined(_M_X64)
#include <immintrin.h>
#define BI_STREAMS 1
static void bi_stream_end(void) { _mm_sfence(); }
#define BI_STREAM_16(to, from, i)                                                                  \
    _mm_stream_si128((__m128i *)(void *)(to) + i, _mm_load_si128((const __m128i *)(from) + i))
#define BI_STREAM_32(to, from, i)                                                                  \
    _mm256_stream_si256((__m256i *)(void *)(to) + i,                                               \
                        _mm256_load_si256((const __m256i *)(from) + i))
#else
#define BI_STREAMS 0
static void bi_stream_end(void) {}
#endif

#define BI_ISA baseline
#define BI_TARGET
#if BI_STREAMS
#define BI_STREAM_LINE(to, from)                                                                   \
    (BI_STREAM_16(to, from, 0), BI_STREAM_16(to, from, 1), BI_STREAM_16(to, from, 2),              \
     BI_STREAM_16(to, from, 3))
#else
#define BI_STREAM_LINE(to, from) memcpy(to, from, 64)
#endif
#if defined(__FP_FAST_FMAF) || defined(__aarch64__) || defined(_M_ARM64)
#define BI_FMA fmaf
#else
#define BI_FMA bi_fma
#endif
#include "_rows_body.h"

#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
#define BI_X86_TARGETS 1

#define BI_ISA avx2
#define BI_FMA fmaf
#define BI_TARGET __attribute__((target("avx2,fma,f16c")))
#define BI_WIDEN_F32(to, at, zero, scale)                                                          \
    (_mm256_store_pd(to, _mm256_cvtps_pd(_mm_loadu_ps((const float *)(const void *)(at)))),        \
     _mm256_store_pd((to) + 4,                                                                     \
                     _mm256_cvtps_pd(_mm_loadu_ps((const float *)(const void *)(at) + 4))))
#define BI_WIDEN_F16(to, at, zero, scale)                                                          \
    _mm256_store_ps(to, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(at))))
#define BI_WIDEN_BF16(to, at, zero, scale)                                                         \
    _mm256_store_ps(to, _mm256_castsi256_ps(_mm256_slli_epi32(                                     \
                            _mm256_cvtepu16_epi32(                                                 \
                                _mm_loadu_si128((const __m128i *)(const void *)(at))),             \
                            16)))
#define BI_WIDEN_8(to, at, zero, scale, extend)                                                    \
    _mm256_store_ps(                                                                               \
        to, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(                                     \
                              extend(_mm_loadl_epi64((const __m128i *)(const void *)(at))),        \
                              _mm256_set1_epi32(zero))),                                           \
                          _mm256_set1_ps(scale)))
#define BI_WIDEN_I8(to, at, zero, scale) BI_WIDEN_8(to, at, zero, scale, _mm256_cvtepi8_epi32)
#define BI_WIDEN_U8(to, at, zero, scale) BI_WIDEN_8(to, at, zero, scale, _mm256_cvtepu8_epi32)
#define BI_NARROW_F16(to, from)                                                                    \
    _mm_storeu_si128((__m128i *)(void *)(to),                                                      \
                     _mm256_cvtps_ph(_mm256_loadu_ps((const float *)(from)), 0))
#define BI_WIDEN_STEP 8
#define BI_STREAM_LINE(to, from) (BI_STREAM_32(to, from, 0), BI_STREAM_32(to, from, 1))
#include "_rows_body.h"

#define BI_ISA avx512
#define BI_FMA fmaf
#define BI_TARGET __attribute__((target("fma,avx512f,avx512bw,avx512dq,avx512vl")))
#define BI_WIDEN_F32(to, at, zero, scale)                                                          \
    (_mm512_store_pd(to, _mm512_cvtps_pd(_mm256_loadu_ps((const float *)(const void *)(at)))),     \
     _mm512_store_pd((to) + 8,                                                                     \
                     _mm512_cvtps_pd(_mm256_loadu_ps((const float *)(const void *)(at) + 8))))
#define BI_WIDEN_F16(to, at, zero, scale)                                                          \
    _mm512_store_ps(to, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(at))))
#define BI_WIDEN_BF16(to, at, zero, scale)                                                         \
    _mm512_store_ps(to, _mm512_castsi512_ps(_mm512_slli_epi32(                                     \
                            _mm512_cvtepu16_epi32(                                                 \
                                _mm256_loadu_si256((const __m256i *)(const void *)(at))),          \
                            16)))
#define BI_WIDEN_8(to, at, zero, scale, extend)                                                    \
    _mm512_store_ps(                                                                               \
        to, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(                                     \
                              extend(_mm_loadu_si128((const __m128i *)(const void *)(at))),        \
                              _mm512_set1_epi32(zero))),                                           \
                          _mm512_set1_ps(scale)))
#define BI_WIDEN_I8(to, at, zero, scale) BI_WIDEN_8(to, at, zero, scale, _mm512_cvtepi8_epi32)
#define BI_WIDEN_U8(to, at, zero, scale) BI_WIDEN_8(to, at, zero, scale, _mm512_cvtepu8_epi32)
#define BI_NARROW_F16(to, from)                                                                    \
    _mm256_storeu_si256((__m256i *)(void *)(to),                                                   \
                        _mm512_cvtps_ph(_mm512_loadu_ps((const float *)(from)), 0))
#define BI_WIDEN_STEP 16
#define BI_STREAM_LINE(to, from)                                                                   \
    _mm512_stream_si512((void *)(to), _mm512_load_si512((const void *)(from)))
#include "_rows_body.h"
#endif

/* Bring the start of a row that comes soon into the cache: table rows lie scattered, so that no
 * hardware guesses where the next one begins; it does guess how it goes on. */
BI_INLINE void bi_prefetch(const char *at, int64_t bytes) {
#if defined(__GNUC__) || defined(__clang__)
    for (int64_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(at + i);
#else
    (void)at, (void)bytes;
#endif
}

/* ---- the choice, once ---- */

enum { BI_ISA_BASELINE, BI_ISA_AVX2, BI_ISA_AVX512, BI_ISAS };

static const char *const bi_isa_names[BI_ISAS] = {"baseline", "avx2", "avx512"};

static int bi_isa_built(int isa) {
#ifdef BI_X86_TARGETS
    return isa < BI_ISAS;
#else
    return isa == BI_ISA_BASELINE;
#endif
}

#ifdef BI_X86_TARGETS
#include <cpuid.h>
static int bi_has_f16c(void) { /* not every compiler's __builtin_cpu_supports knows it */
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

static int bi_isa_runs_here(int isa) {
#ifdef BI_X86_TARGETS
    __builtin_cpu_init();
    if (isa == BI_ISA_AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("fma");
    if (isa == BI_ISA_AVX2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && bi_has_f16c();
#endif
    return isa == BI_ISA_BASELINE;
}

/* kernels that compute in float32 or, if `wide`, in float64 */
static const bi_kernels *bi_kernels_for(int isa, int wide) {
#ifdef BI_X86_TARGETS
    if (isa == BI_ISA_AVX512)
        return wide ? &kernels_F64_avx512 : &kernels_F32_avx512;
    if (isa == BI_ISA_AVX2)
        return wide ? &kernels_F64_avx2 : &kernels_F32_avx2;
#endif
    (void)isa;
    return wide ? &kernels_F64_baseline : &kernels_F32_baseline;
}

#endif
