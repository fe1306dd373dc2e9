/* The bodies of _rows.h for one instruction set: BI_ISA names it, BI_TARGET is its attribute,
 * BI_FMA fuses a multiply-add of float32, BI_STREAM_LINE stores a line past the caches. Where
 * BI_WIDEN_STEP is defined, instructions decode so many elements of each table type T, BI_WIDEN_T,
 * and narrow as many to float16, BI_NARROW_F16. */

/* Moments run in BI_LANES lanes of C over at most BI_BLOCK elements, then in a fixed tree in
 * float64: the same bits whatever the vector width, and little error in long rows. */
#ifndef BI_LANES
#define BI_LANES 32
#define BI_BLOCK 2048
#define BI_PASSES 3
#endif

/* In a function of its own, or GCC mixes the two trees into one that shuffles more than it adds. */
#define BI_HALVE(half)                                                                             \
    for (int k = 0; k < half; k++)                                                                 \
        first[k] += first[k + half];                                                               \
    for (int k = 0; k < half; k++)                                                                 \
        second[k] += second[k + half];
#define BI_TREE(C, ctype)                                                                          \
    static BI_APART BI_TARGET void BI_ISA_NAME(tree_##C)(const ctype *sums, const ctype *squares,  \
                                                         bi_moments *moments) {                    \
        double first[BI_LANES / 2], second[BI_LANES / 2];                                          \
        for (int k = 0; k < BI_LANES / 2; k++)                                                     \
            first[k] = (double)sums[k] + (double)sums[k + BI_LANES / 2];                           \
        for (int k = 0; k < BI_LANES / 2; k++)                                                     \
            second[k] = (double)squares[k] + (double)squares[k + BI_LANES / 2];                    \
        BI_HALVE(8)                                                                                \
        BI_HALVE(4)                                                                                \
        BI_HALVE(2)                                                                                \
        moments->first += first[0] + first[1];                                                     \
        moments->second += second[0] + second[1];                                                  \
    }
BI_TREE(F32, bi_f32)
BI_TREE(F64, bi_f64)

/* BI_LANES elements of a row from the i-th on, by instructions that decode many at a time. */
#ifdef BI_WIDEN_STEP
#define BI_DECODE(T, ctype)                                                                        \
    BI_INLINE BI_TARGET void BI_ISA_NAME(decode_##T)(ctype *to, const bi_row row, int64_t i) {     \
        for (int k = 0; k < BI_LANES; k += BI_WIDEN_STEP)                                          \
            BI_WIDEN_##T(to + k, row.at + (i + k) * BI_BYTES_##T, row.zero, row.scale);            \
    }
#else
#define BI_DECODE(T, ctype)                                                                        \
    BI_INLINE BI_TARGET void BI_ISA_NAME(decode_##T)(ctype *to, const bi_row row, int64_t i) {     \
        for (int k = 0; k < BI_LANES; k++)                                                         \
            to[k] = BI_LOAD_##T(row, i + k);                                                       \
    }
#endif
BI_DECODE(F32, bi_f64)
BI_DECODE(F16, bi_f32)
BI_DECODE(BF16, bi_f32)
BI_DECODE(I8, bi_f32)
BI_DECODE(U8, bi_f32)

/* One kernel over rows of one table type T: ELEMENT is an element of its result. */
#define BI_FOLD(C, ctype, T, dtype, BEFORE, AT, name, TERMS, ELEMENT)                              \
    BI_INLINE BI_TARGET void BI_ISA_NAME(name##_##C##_##T##_in)(                                   \
        ctype##u *sum, const bi_row *rows, int64_t width, bi_moments *moments, const int stream,   \
        const int wants_moments) {                                                                 \
        const bi_row a = rows[0], b = rows[TERMS > 1 ? 1 : 0], c = rows[TERMS > 2 ? 2 : 0];        \
        int64_t i = 0;                                                                             \
        (void)b, (void)c;                                                                          \
        if (stream)                                                                                \
            for (; i < width && (uintptr_t)(sum + i) % 64; i++)                                    \
                sum[i] = ELEMENT(ctype, sum, BI_LOAD_##T, i);                                      \
        while (i < width) {                                                                        \
            const int64_t end = width - i < BI_BLOCK ? width : i + BI_BLOCK;                       \
            ctype sums[BI_LANES] = {0}, squares[BI_LANES] = {0};                                   \
            for (; i + BI_LANES <= end; i += BI_LANES) {                                           \
                BI_LINE ctype lines[BI_LANES];                                                     \
                ctype##u *x = stream ? (ctype##u *)lines : sum + i;                                \
                BEFORE(T, dtype, TERMS)                                                            \
                BI_NO_ALIAS                                                                        \
                for (int k = 0; k < BI_LANES; k++)                                                 \
                    x[k] = ELEMENT(ctype, (sum + i), AT, k);                                       \
                if (stream)                                                                        \
                    for (size_t k = 0; k < BI_LANES; k += 64 / sizeof(ctype))                      \
                        BI_STREAM_LINE(sum + i + k, lines + k);                                    \
                if (wants_moments)                                                                 \
                    for (int k = 0; k < BI_LANES; k++) {                                           \
                        sums[k] += x[k];                                                           \
                        squares[k] += x[k] * x[k];                                                 \
                    }                                                                              \
            }                                                                                      \
            for (int k = 0; i < end; i++, k++) {                                                   \
                const ctype x = ELEMENT(ctype, sum, BI_LOAD_##T, i);                               \
                sum[i] = x;                                                                        \
                sums[k] += x;                                                                      \
                squares[k] += x * x;                                                               \
            }                                                                                      \
            if (wants_moments)                                                                     \
                BI_ISA_NAME(tree_##C)(sums, squares, moments);                                     \
        }                                                                                          \
    }                                                                                              \
    static BI_TARGET void BI_ISA_NAME(name##_##C##_##T)(void *acc, const bi_row *rows,             \
                                                        int64_t width, bi_moments *moments,        \
                                                        int stream) {                              \
        if (moments) {                                                                             \
            moments->first = moments->second = 0;                                                  \
            BI_ISA_NAME(name##_##C##_##T##_in)((ctype##u *)acc, rows, width, moments, 0, 1);       \
        } else if (stream)                                                                         \
            BI_ISA_NAME(name##_##C##_##T##_in)((ctype##u *)acc, rows, width, NULL, 1, 0);          \
        else                                                                                       \
            BI_ISA_NAME(name##_##C##_##T##_in)((ctype##u *)acc, rows, width, NULL, 0, 0);          \
    }
#define BI_SUM1(ctype, to, LOAD, i) (ctype) LOAD(a, i)
#define BI_SUM2(ctype, to, LOAD, i) (ctype) LOAD(a, i) + (ctype)LOAD(b, i)
#define BI_SUM3(ctype, to, LOAD, i) (ctype) LOAD(a, i) + (ctype)LOAD(b, i) + (ctype)LOAD(c, i)
#define BI_ADD(ctype, to, LOAD, i) to[i] + (ctype)LOAD(a, i)

/* Sums of T table rows, computed in C; dtype is what BEFORE decodes to, AT finds an element of it.
 * Adding a table type adds a BI_LOAD_T, a BI_WIDEN_T and lines here. */
#define BI_FOLDS(C, ctype, T, dtype, BEFORE, AT)                                                   \
    BI_FOLD(C, ctype, T, dtype, BEFORE, AT, fold1, 1, BI_SUM1)                                     \
    BI_FOLD(C, ctype, T, dtype, BEFORE, AT, fold2, 2, BI_SUM2)                                     \
    BI_FOLD(C, ctype, T, dtype, BEFORE, AT, fold3, 3, BI_SUM3)                                     \
    BI_FOLD(C, ctype, T, dtype, BEFORE, AT, add, 1, BI_ADD)

BI_FOLDS(F32, bi_f32, F32, bi_f32, BI_AS_IT_IS, BI_NEXT_F32)
BI_FOLDS(F32, bi_f32, F16, bi_f32, BI_DECODE_ROWS, BI_DECODED)
BI_FOLDS(F32, bi_f32, BF16, bi_f32, BI_DECODE_ROWS, BI_DECODED)
BI_FOLDS(F32, bi_f32, I8, bi_f32, BI_DECODE_ROWS, BI_DECODED)
BI_FOLDS(F32, bi_f32, U8, bi_f32, BI_DECODE_ROWS, BI_DECODED)
BI_FOLDS(F64, bi_f64, F64, bi_f64, BI_AS_IT_IS, BI_NEXT_F64)
BI_FOLDS(F64, bi_f64, F32, bi_f64, BI_DECODE_ROWS, BI_DECODED)
BI_FOLDS(F64, bi_f64, F16, bi_f32, BI_DECODE_ROWS, BI_DECODED)
BI_FOLDS(F64, bi_f64, BF16, bi_f32, BI_DECODE_ROWS, BI_DECODED)
BI_FOLDS(F64, bi_f64, I8, bi_f32, BI_DECODE_ROWS, BI_DECODED)
BI_FOLDS(F64, bi_f64, U8, bi_f32, BI_DECODE_ROWS, BI_DECODED)

#define BI_ROUND(C, ctype, D, dtype, convert)                                                      \
    static BI_TARGET void BI_ISA_NAME(round_##C##_##D)(const void *acc, void *BI_RESTRICT out,     \
                                                       int64_t width) {                            \
        const ctype##u *sum = (const ctype##u *)acc;                                               \
        dtype *BI_RESTRICT result = (dtype *)out;                                                  \
        for (int64_t i = 0; i < width; i++)                                                        \
            result[i] = convert(sum[i]);                                                           \
    }

#ifdef BI_NARROW_F16
static BI_TARGET void BI_ISA_NAME(round_F32_F16)(const void *acc, void *BI_RESTRICT out,
                                                 int64_t width) {
    const bi_f32u *sum = (const bi_f32u *)acc;
    bi_u16u *BI_RESTRICT result = (bi_u16u *)out;
    int64_t i = 0;
    for (; i + BI_WIDEN_STEP <= width; i += BI_WIDEN_STEP)
        BI_NARROW_F16(result + i, sum + i);
    for (; i < width; i++)
        result[i] = bi_to_f16(sum[i]);
}
#else
BI_ROUND(F32, bi_f32, F16, bi_u16u, bi_to_f16)
#endif
BI_ROUND(F32, bi_f32, BF16, bi_u16u, bi_to_bf16)
BI_ROUND(F64, bi_f64, F32, bi_f32u, (float))
#define BI_F64_TO_F16(value) bi_to_f16(bi_to_odd(value))
#define BI_F64_TO_BF16(value) bi_to_bf16(bi_to_odd(value))
BI_ROUND(F64, bi_f64, F16, bi_u16u, BI_F64_TO_F16)
BI_ROUND(F64, bi_f64, BF16, bi_u16u, BI_F64_TO_BF16)

/* LayerNorm, population variance: (x - mean) / sqrt(variance + eps) * weight + bias
 * (Ba, Kiros and Hinton, "Layer Normalization", 2016).
 *
 * The sum's own pass has taken the first two moments about 0. Where the mean exceeds the
 * deviation, that loses digits (rows of mean 10 and deviation 0.01: 6 % of the variance), and a
 * second pass takes them about the mean; a third serves means that were too coarse. Where even
 * that leaves doubt, or squares leave C's range, the row is computed again in float64, scaled.
 */
#define BI_MOMENTS(C, ctype)                                                                       \
    static BI_TARGET bi_moments BI_ISA_NAME(moments_##C)(const ctype##u *BI_RESTRICT x,            \
                                                         int64_t width, ctype shift) {             \
        bi_moments moments = {0, 0};                                                               \
        for (int64_t i = 0; i < width;) {                                                          \
            const int64_t end = width - i < BI_BLOCK ? width : i + BI_BLOCK;                       \
            ctype sums[BI_LANES] = {0}, squares[BI_LANES] = {0};                                   \
            for (; i + BI_LANES <= end; i += BI_LANES)                                             \
                for (int k = 0; k < BI_LANES; k++) {                                               \
                    const ctype d = x[i + k] - shift;                                              \
                    sums[k] += d;                                                                  \
                    squares[k] += d * d;                                                           \
                }                                                                                  \
            for (int k = 0; i < end; i++, k++) {                                                   \
                const ctype d = x[i] - shift;                                                      \
                sums[k] += d;                                                                      \
                squares[k] += d * d;                                                               \
            }                                                                                      \
            BI_ISA_NAME(tree_##C)(sums, squares, &moments);                                        \
        }                                                                                          \
        return moments;                                                                            \
    }

#ifndef BI_NORM_FAR
/* What the last pass subtracts and multiplies by; rstd < 0: the row goes the long way. */
typedef struct {
    float mean, rest, rstd;
} bi_scale_F32;
typedef struct {
    double mean, rest, rstd;
} bi_scale_F64;
BI_INLINE void bi_set_F32(bi_scale_F32 *scale, float shift, double left, double rstd) {
    const double middle = (double)shift + left;
    scale->mean = (float)middle;
    scale->rest = (float)(((double)scale->mean - middle) * rstd);
    scale->rstd = (float)rstd;
}
BI_INLINE void bi_set_F64(bi_scale_F64 *scale, double shift, double left, double rstd) {
    scale->mean = shift;
    scale->rest = left;
    scale->rstd = rstd;
}

/* The rare row whose mean dwarfs its deviation, or whose squares overflow or vanish: scaled by a
 * power of two into the middle of float64's range, then the textbook's two passes. NaN and
 * infinity end as NaN, as by formula. */
#define BI_NORM_FAR(C, ctype)                                                                      \
    static void bi_norm_far_##C(const ctype##u *x, int64_t width, const ctype##u *w,               \
                                const ctype##u *b, double eps, ctype##u *result) {                 \
        double most = 0, mean = 0, left = 0, spread = 0;                                           \
        int exponent = 0;                                                                          \
        for (int64_t i = 0; i < width; i++)                                                        \
            most = fabs((double)x[i]) > most ? fabs((double)x[i]) : most;                          \
        if (most <= 1.7976931348623157e308)                                                        \
            (void)frexp(most, &exponent);                                                          \
        for (int64_t i = 0; i < width; i++)                                                        \
            mean += ldexp((double)x[i], -exponent) / (double)width;                                \
        for (int64_t i = 0; i < width; i++)                                                        \
            left += (ldexp((double)x[i], -exponent) - mean) / (double)width;                       \
        mean += left;                                                                              \
        for (int64_t i = 0; i < width; i++) {                                                      \
            double d = ldexp((double)x[i], -exponent) - mean;                                      \
            spread += d * d / (double)width;                                                       \
        }                                                                                          \
        double rstd = 1.0 / sqrt(spread + ldexp(eps, -2 * exponent));                              \
        for (int64_t i = 0; i < width; i++) {                                                      \
            double unit = (ldexp((double)x[i], -exponent) - mean) * rstd;                          \
            result[i] = (ctype)(unit * (double)w[i] + (double)b[i]);                               \
        }                                                                                          \
    }
BI_NORM_FAR(F32, bi_f32)
BI_NORM_FAR(F64, bi_f64)
#endif

/* The last pass, over two rows at once, which share the loads of weight and bias, or over one.
 * In float32 two fused multiply-adds, rounded as IEEE 754 says, keep the largest error below that
 * of PyTorch, which rounds six times. */
#define BI_UNIT_F32(x, s, i) BI_FMA(BI_FMA(x[i] - s.mean, s.rstd, s.rest), w[i], b[i])
#define BI_UNIT_F64(x, s, i) ((x[i] - s.mean - s.rest) * s.rstd * w[i] + b[i])
#define BI_FINISH(C, ctype)                                                                        \
    static BI_TARGET void BI_ISA_NAME(finish_two_##C)(                                             \
        const ctype##u *BI_RESTRICT x, const ctype##u *BI_RESTRICT y, int64_t width,               \
        const ctype##u *BI_RESTRICT w, const ctype##u *BI_RESTRICT b, const bi_scale_##C *scales,  \
        ctype##u *BI_RESTRICT out_x, ctype##u *BI_RESTRICT out_y) {                                \
        const bi_scale_##C s = scales[0], t = scales[1];                                           \
        for (int64_t i = 0; i < width; i++) {                                                      \
            const ctype of_x = BI_UNIT_##C(x, s, i), of_y = BI_UNIT_##C(y, t, i);                  \
            out_x[i] = of_x;                                                                       \
            out_y[i] = of_y;                                                                       \
        }                                                                                          \
    }                                                                                              \
    static BI_TARGET void BI_ISA_NAME(finish_##C)(                                                 \
        const ctype##u *BI_RESTRICT x, int64_t width, const ctype##u *BI_RESTRICT w,               \
        const ctype##u *BI_RESTRICT b, const bi_scale_##C s, int stream,                           \
        ctype##u *BI_RESTRICT out) {                                                               \
        int64_t i = 0;                                                                             \
        if (stream) {                                                                              \
            for (; i < width && (uintptr_t)(out + i) % 64; i++)                                    \
                out[i] = BI_UNIT_##C(x, s, i);                                                     \
            for (; i + BI_LANES <= width; i += BI_LANES) {                                         \
                BI_LINE ctype lines[BI_LANES];                                                     \
                for (int k = 0; k < BI_LANES; k++)                                                 \
                    lines[k] = BI_UNIT_##C(x, s, i + k);                                           \
                for (size_t k = 0; k < BI_LANES; k += 64 / sizeof(ctype))                          \
                    BI_STREAM_LINE(out + i + k, lines + k);                                        \
            }                                                                                      \
        }                                                                                          \
        for (; i < width; i++)                                                                     \
            out[i] = BI_UNIT_##C(x, s, i);                                                         \
    }

#define BI_NORM(C, ctype, LEAST, MOST)                                                             \
    BI_MOMENTS(C, ctype)                                                                           \
    BI_FINISH(C, ctype)                                                                            \
    static BI_TARGET void BI_ISA_NAME(norm_##C)(                                                   \
        const char *acc, int64_t acc_step, const bi_moments *moments, int64_t rows, int64_t width, \
        const bi_norm_vectors *vectors, char *out, int64_t out_step, int stream) {                 \
        const ctype##u *w = (const ctype##u *)vectors->weight;                                     \
        const ctype##u *b = (const ctype##u *)vectors->bias;                                       \
        const double share = 1.0 / (double)width;                                                  \
        bi_scale_##C scales[BI_NORM_ROWS];                                                         \
        for (int64_t r = 0; r < rows; r++) {                                                       \
            const ctype##u *x = (const ctype##u *)(acc + r * acc_step);                            \
            bi_moments of = moments[r];                                                            \
            double left, spread, variance;                                                         \
            ctype shift = 0;                                                                       \
            for (int pass = 1;; pass++) {                                                          \
                left = of.first * share;                                                           \
                spread = of.second * share - left * left;                                          \
                if (left * left <= spread || pass == BI_PASSES)                                    \
                    break;                                                                         \
                shift = (ctype)(shift + left);                                                     \
                of = BI_ISA_NAME(moments_##C)(x, width, shift);                                    \
            }                                                                                      \
            variance = (spread > 0 ? spread : 0) + vectors->eps;                                   \
            if (left * left <= spread && variance >= LEAST && spread <= MOST)                      \
                bi_set_##C(&scales[r], shift, left, 1.0 / sqrt(variance));                         \
            else                                                                                   \
                scales[r].rstd = -1;                                                               \
        }                                                                                          \
        for (int64_t r = 0; r < rows;) {                                                           \
            const ctype##u *x = (const ctype##u *)(acc + r * acc_step);                            \
            const ctype##u *y = (const ctype##u *)(acc + (r + 1) * acc_step);                      \
            ctype##u *out_x = (ctype##u *)(out + r * out_step);                                    \
            ctype##u *out_y = (ctype##u *)(out + (r + 1) * out_step);                              \
            const int two = r + 1 < rows && scales[r].rstd >= 0 && scales[r + 1].rstd >= 0;        \
            if (two && !stream)                                                                    \
                BI_ISA_NAME(finish_two_##C)(x, y, width, w, b, scales + r, out_x, out_y);          \
            else if (scales[r].rstd >= 0)                                                          \
                BI_ISA_NAME(finish_##C)(x, width, w, b, scales[r], stream, out_x);                 \
            else                                                                                   \
                bi_norm_far_##C(x, width, w, b, vectors->eps, out_x);                              \
            r += 1 + (two && !stream);                                                             \
        }                                                                                          \
    }

BI_NORM(F32, bi_f32, 1e-30, 1e30)
BI_NORM(F64, bi_f64, 1e-280, 1e280)

#define BI_OF(name, C, T) BI_ISA_NAME(name##_##C##_##T)

/* float64 tables are never computed in float32 */
static const bi_kernels BI_ISA_NAME(kernels_F32) = {
    {{NULL, BI_OF(fold1, F32, F32), BI_OF(fold1, F32, F16), BI_OF(fold1, F32, BF16),
      BI_OF(fold1, F32, I8), BI_OF(fold1, F32, U8)},
     {NULL, BI_OF(fold2, F32, F32), BI_OF(fold2, F32, F16), BI_OF(fold2, F32, BF16),
      BI_OF(fold2, F32, I8), BI_OF(fold2, F32, U8)},
     {NULL, BI_OF(fold3, F32, F32), BI_OF(fold3, F32, F16), BI_OF(fold3, F32, BF16),
      BI_OF(fold3, F32, I8), BI_OF(fold3, F32, U8)}},
    {NULL, BI_OF(add, F32, F32), BI_OF(add, F32, F16), BI_OF(add, F32, BF16), BI_OF(add, F32, I8),
     BI_OF(add, F32, U8)},
    BI_ISA_NAME(norm_F32),
    {NULL, NULL, BI_OF(round, F32, F16), BI_OF(round, F32, BF16)},
};
static const bi_kernels BI_ISA_NAME(kernels_F64) = {
    {{BI_OF(fold1, F64, F64), BI_OF(fold1, F64, F32), BI_OF(fold1, F64, F16),
      BI_OF(fold1, F64, BF16), BI_OF(fold1, F64, I8), BI_OF(fold1, F64, U8)},
     {BI_OF(fold2, F64, F64), BI_OF(fold2, F64, F32), BI_OF(fold2, F64, F16),
      BI_OF(fold2, F64, BF16), BI_OF(fold2, F64, I8), BI_OF(fold2, F64, U8)},
     {BI_OF(fold3, F64, F64), BI_OF(fold3, F64, F32), BI_OF(fold3, F64, F16),
      BI_OF(fold3, F64, BF16), BI_OF(fold3, F64, I8), BI_OF(fold3, F64, U8)}},
    {BI_OF(add, F64, F64), BI_OF(add, F64, F32), BI_OF(add, F64, F16), BI_OF(add, F64, BF16),
     BI_OF(add, F64, I8), BI_OF(add, F64, U8)},
    BI_ISA_NAME(norm_F64),
    {NULL, BI_OF(round, F64, F32), BI_OF(round, F64, F16), BI_OF(round, F64, BF16)},
};

#undef BI_HALVE
#undef BI_TREE
#undef BI_DECODE
#undef BI_FOLD
#undef BI_FOLDS
#undef BI_SUM1
#undef BI_SUM2
#undef BI_SUM3
#undef BI_ADD
#undef BI_ROUND
#undef BI_F64_TO_F16
#undef BI_F64_TO_BF16
#undef BI_NORM
#undef BI_MOMENTS
#undef BI_FINISH
#undef BI_UNIT_F32
#undef BI_UNIT_F64
#undef BI_OF

/* what an instruction set defined before it included this */
#undef BI_ISA
#undef BI_TARGET
#undef BI_FMA
#undef BI_STREAM_LINE
#undef BI_WIDEN_STEP
#undef BI_WIDEN_F32
#undef BI_WIDEN_F16
#undef BI_WIDEN_BF16
#undef BI_WIDEN_8
#undef BI_WIDEN_I8
#undef BI_WIDEN_U8
#undef BI_NARROW_F16
