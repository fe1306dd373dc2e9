/* Ids as they come: any integer type, byte order, alignment and strides, read without a copy. */
#ifndef BERTINPUT_IDS_H
#define BERTINPUT_IDS_H

#include <stdint.h>
#include <string.h>

#define BI_MAX_DIMS 64 /* NumPy 2's limit; NumPy 1's is 32 */

typedef struct {
    const char *data;
    int dims;
    int itemsize;
    int is_signed;
    int swapped;
    int64_t shape[BI_MAX_DIMS];
    int64_t stride[BI_MAX_DIMS]; /* bytes; 0 along an axis that is broadcast */
} bi_ids;

#define BI_READ_EVERY(type, swap, step)                                                            \
    for (int64_t i = 0; i < count; i++) {                                                          \
        type value;                                                                                \
        memcpy(&value, at + i * (step), sizeof value);                                             \
        ids[i] = (int64_t)swap(value);                                                             \
    }
/* ids side by side are told apart from others so that the loop over them vectorises */
#define BI_READ(type, swap)                                                                        \
    if (stride == (int64_t)sizeof(type))                                                           \
        BI_READ_EVERY(type, swap, (int64_t)sizeof(type))                                           \
    else                                                                                           \
        BI_READ_EVERY(type, swap, stride)                                                          \
    break

/* shifts rather than built-ins: compilers know the pattern, and every one has shifts */
static inline uint16_t bi_swap16(uint16_t v) { return (uint16_t)(v << 8 | v >> 8); }
static inline uint32_t bi_swap32(uint32_t v) {
    return v << 24 | (v & 0xff00u) << 8 | (v >> 8 & 0xff00u) | v >> 24;
}
static inline uint64_t bi_swap64(uint64_t v) {
    return (uint64_t)bi_swap32((uint32_t)v) << 32 | bi_swap32((uint32_t)(v >> 32));
}
#define BI_AS_IS(v) (v)
#define BI_SWAP_I16(v) (int16_t)bi_swap16(v)
#define BI_SWAP_I32(v) (int32_t)bi_swap32(v)

/* `count` ids from `at` on, as int64. uint64 values of 2**63 and more come out negative: an id
 * out of range like any other negative one. */
static void bi_read_ids(const bi_ids *from, const char *at, int64_t stride, int64_t count,
                        int64_t *ids) {
    switch (from->itemsize * 4 + from->swapped * 2 + from->is_signed) {
    case 32: BI_READ(uint64_t, BI_AS_IS);
    case 33: BI_READ(int64_t, BI_AS_IS);
    case 34:
    case 35: BI_READ(uint64_t, bi_swap64);
    case 16: BI_READ(uint32_t, BI_AS_IS);
    case 17: BI_READ(int32_t, BI_AS_IS);
    case 18: BI_READ(uint32_t, bi_swap32);
    case 19: BI_READ(uint32_t, BI_SWAP_I32);
    case 8: BI_READ(uint16_t, BI_AS_IS);
    case 9: BI_READ(int16_t, BI_AS_IS);
    case 10: BI_READ(uint16_t, bi_swap16);
    case 11: BI_READ(uint16_t, BI_SWAP_I16);
    case 5:
    case 7: BI_READ(int8_t, BI_AS_IS);
    default: BI_READ(uint8_t, BI_AS_IS);
    }
}

/* Place of the first id outside 0..rows-1 among `count`, or -1. An id is inside if neither it nor
 * rows-1-id has its sign bit set, which needs no comparison of 64-bit numbers: SSE2 has none. */
static int64_t bi_first_outside(const int64_t *ids, int64_t count, int64_t rows) {
    uint64_t signs = 0;
    for (int64_t i = 0; i < count; i++)
        signs |= (uint64_t)ids[i] | ((uint64_t)(rows - 1) - (uint64_t)ids[i]);
    if (signs >> 63)
        for (int64_t i = 0; i < count; i++)
            if ((uint64_t)ids[i] >= (uint64_t)rows)
                return i;
    return -1;
}

#endif
