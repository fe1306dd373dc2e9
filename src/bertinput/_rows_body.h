/* The bodies of _rows.h for one instruction set: BI_ISA names it, BI_TARGET is its attribute,
 * BI_FMA is its fused multiply-add of float32. */

/* Sums of T table rows, computed in C. Adding a table type adds a BI_LOAD_T and a line below. */
#define BI_FOLDS(C, ctype, T)                                                                      \
    static BI_TARGET void BI_ISA_NAME(fold1_##C##_##T)(void *BI_RESTRICT acc,                      \
                                                       const bi_row *rows, int64_t width) {        \
        ctype##u *BI_RESTRICT sum = (ctype##u *)acc;                                               \
        const bi_row a = rows[0];                                                                  \
        for (int64_t i = 0; i < width; i++)                                                        \
            sum[i] = (ctype)BI_LOAD_##T(a, i);                                                     \
    }                                                                                              \
    static BI_TARGET void BI_ISA_NAME(fold2_##C##_##T)(void *BI_RESTRICT acc,                      \
                                                       const bi_row *rows, int64_t width) {        \
        ctype##u *BI_RESTRICT sum = (ctype##u *)acc;                                               \
        const bi_row a = rows[0], b = rows[1];                                                     \
        for (int64_t i = 0; i < width; i++)                                                        \
            sum[i] = (ctype)BI_LOAD_##T(a, i) + (ctype)BI_LOAD_##T(b, i);                          \
    }                                                                                              \
    static BI_TARGET void BI_ISA_NAME(fold3_##C##_##T)(void *BI_RESTRICT acc,                      \
                                                       const bi_row *rows, int64_t width) {        \
        ctype##u *BI_RESTRICT sum = (ctype##u *)acc;                                               \
        const bi_row a = rows[0], b = rows[1], c = rows[2];                                        \
        for (int64_t i = 0; i < width; i++)                                                        \
            sum[i] = (ctype)BI_LOAD_##T(a, i) + (ctype)BI_LOAD_##T(b, i) +                         \
                     (ctype)BI_LOAD_##T(c, i);                                                     \
    }                                                                                              \
    static BI_TARGET void BI_ISA_NAME(add_##C##_##T)(void *BI_RESTRICT acc, const bi_row *rows,    \
                                                     int64_t width) {                              \
        ctype##u *BI_RESTRICT sum = (ctype##u *)acc;                                               \
        const bi_row a = rows[0];                                                                  \
        for (int64_t i = 0; i < width; i++)                                                        \
            sum[i] += (ctype)BI_LOAD_##T(a, i);                                                    \
    }

BI_FOLDS(F32, bi_f32, F32)
BI_FOLDS(F32, bi_f32, F16)
BI_FOLDS(F32, bi_f32, BF16)
BI_FOLDS(F32, bi_f32, I8)
BI_FOLDS(F32, bi_f32, U8)
BI_FOLDS(F64, bi_f64, F64)
BI_FOLDS(F64, bi_f64, F32)
BI_FOLDS(F64, bi_f64, F16)
BI_FOLDS(F64, bi_f64, BF16)
BI_FOLDS(F64, bi_f64, I8)
BI_FOLDS(F64, bi_f64, U8)

#define BI_ROUND(C, ctype, D, dtype, convert)                                                      \
    static BI_TARGET void BI_ISA_NAME(round_##C##_##D)(const void *acc, void *BI_RESTRICT out,     \
                                                       int64_t width) {                            \
        const ctype##u *sum = (const ctype##u *)acc;                                               \
        dtype *BI_RESTRICT result = (dtype *)out;                                                  \
        for (int64_t i = 0; i < width; i++)                                                        \
            result[i] = convert(sum[i]);                                                           \
    }

BI_ROUND(F32, bi_f32, F16, bi_u16u, bi_to_f16)
BI_ROUND(F32, bi_f32, BF16, bi_u16u, bi_to_bf16)
BI_ROUND(F64, bi_f64, F32, bi_f32u, (float))
#define BI_F64_TO_F16(value) bi_to_f16(bi_to_odd(value))
#define BI_F64_TO_BF16(value) bi_to_bf16(bi_to_odd(value))
BI_ROUND(F64, bi_f64, F16, bi_u16u, BI_F64_TO_F16)
BI_ROUND(F64, bi_f64, BF16, bi_u16u, BI_F64_TO_BF16)

/* LayerNorm, population variance: (x - mean) / sqrt(variance + eps) * weight + bias
 * (Ba, Kiros and Hinton, "Layer Normalization", 2016).
 *
 * One pass takes the first two moments about 0. Where the mean exceeds the deviation, that would
 * lose digits (rows of mean 10 and deviation 0.01: 6 % of the variance), and a second pass takes
 * them about the mean; a third serves means that were too coarse. Sums run in BI_LANES lanes of C
 * over at most BI_BLOCK elements, then in a fixed tree in float64. Where even that leaves doubt,
 * or squares leave C's range, the row is computed again in float64, scaled.
 */
#ifndef BI_LANES
#define BI_LANES 32
#define BI_BLOCK 2048
#define BI_PASSES 3
#define BI_TREE(C, ctype)                                                                          \
    BI_INLINE double bi_tree_##C(const ctype *lane) {                                              \
        double sum[BI_LANES / 2];                                                                  \
        for (int k = 0; k < BI_LANES / 2; k++)                                                     \
            sum[k] = (double)lane[k] + (double)lane[k + BI_LANES / 2];                             \
        for (int half = BI_LANES / 4; half; half /= 2)                                             \
            for (int k = 0; k < half; k++)                                                         \
                sum[k] += sum[k + half];                                                           \
        return sum[0];                                                                             \
    }
BI_TREE(F32, bi_f32)
BI_TREE(F64, bi_f64)
#endif

#define BI_MOMENTS(C, ctype)                                                                       \
    static BI_TARGET void BI_ISA_NAME(moments_##C)(const ctype##u *BI_RESTRICT row, int64_t width, \
                                                   ctype shift, double *first, double *second) {   \
        *first = *second = 0;                                                                      \
        for (int64_t done = 0; done < width; done += BI_BLOCK) {                                   \
            const ctype##u *BI_RESTRICT x = row + done;                                            \
            const int64_t count = width - done < BI_BLOCK ? width - done : BI_BLOCK;               \
            const int64_t whole = count - count % BI_LANES;                                        \
            ctype sums[BI_LANES] = {0}, squares[BI_LANES] = {0}, tail[BI_LANES];                   \
            for (int64_t i = 0; i < whole; i += BI_LANES)                                          \
                for (int k = 0; k < BI_LANES; k++) {                                               \
                    ctype d = x[i + k] - shift;                                                    \
                    sums[k] += d;                                                                  \
                    squares[k] += d * d;                                                           \
                }                                                                                  \
            if (whole < count) {                                                                   \
                for (int k = 0; k < BI_LANES; k++)                                                 \
                    tail[k] = shift;                                                               \
                memcpy(tail, x + whole, (size_t)(count - whole) * sizeof(ctype));                  \
                for (int k = 0; k < BI_LANES; k++) {                                               \
                    ctype d = tail[k] - shift;                                                     \
                    sums[k] += d;                                                                  \
                    squares[k] += d * d;                                                           \
                }                                                                                  \
            }                                                                                      \
            *first += bi_tree_##C(sums);                                                           \
            *second += bi_tree_##C(squares);                                                       \
        }                                                                                          \
        *first /= (double)width;                                                                   \
        *second /= (double)width;                                                                  \
    }

/* The last pass in float32: two fused multiply-adds, rounded as IEEE 754 says, keep the largest
 * error below that of PyTorch, which rounds six times. */
static BI_TARGET void BI_ISA_NAME(finish_F32)(const bi_f32u *BI_RESTRICT x, int64_t width,
                                              const bi_f32u *BI_RESTRICT w,
                                              const bi_f32u *BI_RESTRICT b, float shift,
                                              double left, double rstd,
                                              bi_f32u *BI_RESTRICT result) {
    const double middle = (double)shift + left;
    const float mean = (float)middle, scale = (float)rstd;
    const float rest = (float)(((double)mean - middle) * rstd);
    if (b)
        for (int64_t i = 0; i < width; i++)
            result[i] = BI_FMA(BI_FMA(x[i] - mean, scale, rest), w[i], b[i]);
    else
        for (int64_t i = 0; i < width; i++)
            result[i] = BI_FMA(x[i] - mean, scale, rest) * w[i];
}

static BI_TARGET void BI_ISA_NAME(finish_F64)(const bi_f64u *BI_RESTRICT x, int64_t width,
                                              const bi_f64u *BI_RESTRICT w,
                                              const bi_f64u *BI_RESTRICT b, double shift,
                                              double left, double rstd,
                                              bi_f64u *BI_RESTRICT result) {
    if (b)
        for (int64_t i = 0; i < width; i++)
            result[i] = ((x[i] - shift) - left) * rstd * w[i] + b[i];
    else
        for (int64_t i = 0; i < width; i++)
            result[i] = ((x[i] - shift) - left) * rstd * w[i];
}

#ifndef BI_NORM_FAR
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
            result[i] = (ctype)(b ? unit * (double)w[i] + (double)b[i] : unit * (double)w[i]);     \
        }                                                                                          \
    }
BI_NORM_FAR(F32, bi_f32)
BI_NORM_FAR(F64, bi_f64)
#endif

#define BI_NORM(C, ctype, LEAST, MOST)                                                             \
    BI_MOMENTS(C, ctype)                                                                           \
    static BI_TARGET void BI_ISA_NAME(norm_##C)(const void *acc, int64_t width,                    \
                                                const void *weight, const void *bias, double eps,  \
                                                void *out) {                                       \
        const ctype##u *x = (const ctype##u *)acc;                                                 \
        const ctype##u *w = (const ctype##u *)weight, *b = (const ctype##u *)bias;                 \
        ctype##u *result = (ctype##u *)out;                                                        \
        ctype shift = 0;                                                                           \
        double left = 0, spread = 0, variance;                                                     \
        int settled = 0;                                                                           \
        for (int pass = 0; pass < BI_PASSES && !settled; pass++) {                                 \
            double square;                                                                         \
            shift = (ctype)(shift + left);                                                         \
            BI_ISA_NAME(moments_##C)(x, width, shift, &left, &square);                             \
            spread = square - left * left;                                                         \
            settled = left * left <= spread;                                                       \
        }                                                                                          \
        variance = (spread > 0 ? spread : 0) + eps;                                                \
        if (settled && variance >= LEAST && spread <= MOST)                                        \
            BI_ISA_NAME(finish_##C)(x, width, w, b, shift, left, 1.0 / sqrt(variance), result);    \
        else                                                                                       \
            bi_norm_far_##C(x, width, w, b, eps, result);                                          \
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

#undef BI_FOLDS
#undef BI_ROUND
#undef BI_F64_TO_F16
#undef BI_F64_TO_BF16
#undef BI_NORM
#undef BI_MOMENTS
#undef BI_OF
