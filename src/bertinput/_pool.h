/* Memory of results, kept to be used again: a new result of a megabyte and more costs more in pages
 * that the system maps, clears and unmaps than the sum that fills it.
 *
 * A bounded list of blocks under a lock that nobody waits for on the way to a result: who finds it
 * taken goes to the system instead. NumPy gives a block back when the last array that refers to it
 * is gone, through the handler that it remembers with the array (NEP 49).
 */
#ifndef BERTINPUT_POOL_H
#define BERTINPUT_POOL_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(_MSC_VER) && !defined(__clang__)
#include <intrin.h>
typedef volatile long bi_lock;
#define BI_TRY_LOCK(lock) (_InterlockedExchange(lock, 1) == 0)
#define BI_UNLOCK(lock) ((void)_InterlockedExchange(lock, 0))
#else
typedef int bi_lock;
#define BI_TRY_LOCK(lock) (__atomic_exchange_n(lock, 1, __ATOMIC_ACQUIRE) == 0)
#define BI_UNLOCK(lock) __atomic_store_n(lock, 0, __ATOMIC_RELEASE)
#endif

#ifdef _WIN32
#include <malloc.h>
static void *bi_map(size_t bytes) { return _aligned_malloc(bytes, 64); }
static void bi_unmap(void *at, size_t bytes) { (void)bytes, _aligned_free(at); }
#else
#include <sys/mman.h>
/* mapped, not allocated, so that it goes back to the system when it is given back */
static void *bi_map(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return NULL;
#ifdef MADV_HUGEPAGE
    if (bytes >= (size_t)1 << 22) /* as NumPy does for its own arrays */
        (void)madvise(at, bytes, MADV_HUGEPAGE);
#endif
    return at;
}
static void bi_unmap(void *at, size_t bytes) { (void)munmap(at, bytes); }
#endif

enum {
    BI_POOL_BLOCKS = 64,
    BI_POOL_STEP = 1 << 16, /* blocks are multiples of this, so that they serve similar sizes */
};

/* A block begins with this and continues with the result's memory, 64-byte aligned. */
typedef struct bi_block {
    size_t bytes; /* of all of it */
    char padding[64 - sizeof(size_t)];
} bi_block;

static struct {
    bi_lock lock;
    int count;
    size_t held, limit;                /* bytes */
    bi_block *block[BI_POOL_BLOCKS]; /* the one that was given back first comes first */
} bi_pool = {0, 0, 0, (size_t)256 << 20, {0}};

/* A block taken out of the list, which closes up. */
static bi_block *bi_pool_take(int place) {
    bi_block *taken = bi_pool.block[place];
    bi_pool.held -= taken->bytes;
    bi_pool.count--;
    memmove(bi_pool.block + place, bi_pool.block + place + 1,
            (size_t)(bi_pool.count - place) * sizeof taken);
    return taken;
}

static void bi_pool_wait(void) {
    while (!BI_TRY_LOCK(&bi_pool.lock)) /* held for less than a microsecond */
        ;
}

/* Give the system back what exceeds `keep`, with the lock taken, which this leaves; how much. */
static size_t bi_pool_shrink(size_t keep) {
    bi_block *gone[BI_POOL_BLOCKS];
    size_t bytes = 0;
    int count = 0;
    while (bi_pool.held > keep)
        gone[count++] = bi_pool_take(0);
    BI_UNLOCK(&bi_pool.lock);
    while (count--) {
        bytes += gone[count]->bytes;
        bi_unmap(gone[count], gone[count]->bytes);
    }
    return bytes;
}

static void bi_pool_set_limit(size_t limit) {
    bi_pool_wait();
    bi_pool.limit = limit;
    (void)bi_pool_shrink(limit);
}

static size_t bi_pool_trim(void) {
    bi_pool_wait();
    return bi_pool_shrink(0);
}

static void *bi_pool_malloc(void *context, size_t size) {
    bi_block *found = NULL;
    size_t bytes;
    (void)context;
    if (size > SIZE_MAX - sizeof(bi_block) - BI_POOL_STEP)
        return NULL;
    bytes = (size + sizeof(bi_block) + BI_POOL_STEP - 1) / BI_POOL_STEP * BI_POOL_STEP;
    if (BI_TRY_LOCK(&bi_pool.lock)) {
        int best = -1;
        for (int k = 0; k < bi_pool.count; k++) {
            const size_t have = bi_pool.block[k]->bytes;
            /* no more than half of a block lies idle; of equals the last one, warm in the cache */
            if (have >= bytes && have / 2 <= bytes &&
                (best < 0 || have <= bi_pool.block[best]->bytes))
                best = k;
        }
        if (best >= 0)
            found = bi_pool_take(best);
        BI_UNLOCK(&bi_pool.lock);
    }
    if (!found) {
        found = (bi_block *)bi_map(bytes);
        if (!found && bi_pool_trim()) /* what lies idle here may be what is missing */
            found = (bi_block *)bi_map(bytes);
        if (!found)
            return NULL;
        found->bytes = bytes;
    }
    return found + 1;
}

static void bi_pool_free(void *context, void *memory, size_t size) {
    bi_block *given, *gone[BI_POOL_BLOCKS + 1];
    int count = 0;
    (void)context, (void)size;
    if (!memory)
        return;
    given = (bi_block *)memory - 1;
    if (BI_TRY_LOCK(&bi_pool.lock)) {
        if (given->bytes <= bi_pool.limit) {
            while (bi_pool.count == BI_POOL_BLOCKS ||
                   bi_pool.held > bi_pool.limit - given->bytes)
                gone[count++] = bi_pool_take(0);
            bi_pool.block[bi_pool.count++] = given;
            bi_pool.held += given->bytes;
            given = NULL;
        }
        BI_UNLOCK(&bi_pool.lock);
    }
    if (given)
        gone[count++] = given;
    while (count--)
        bi_unmap(gone[count], gone[count]->bytes);
}

static void *bi_pool_calloc(void *context, size_t count, size_t size) {
    void *memory = size && count > SIZE_MAX / size ? NULL : bi_pool_malloc(context, count * size);
    if (memory)
        memset(memory, 0, count * size);
    return memory;
}

static void *bi_pool_realloc(void *context, void *memory, size_t size) {
    size_t have;
    void *moved;
    if (!memory)
        return bi_pool_malloc(context, size);
    have = ((bi_block *)memory - 1)->bytes - sizeof(bi_block);
    if (size <= have && size >= have / 2)
        return memory;
    moved = bi_pool_malloc(context, size);
    if (moved) {
        memcpy(moved, memory, size < have ? size : have);
        bi_pool_free(context, memory, have);
    }
    return moved;
}

static size_t bi_pool_limit(void) { return bi_pool.limit; }
static size_t bi_pool_held(void) { return bi_pool.held; }

/* In a forked child: if another thread held the lock, its list may be half written, and is left
 * alone; so is its memory. */
static void bi_pool_after_fork(void) {
    if (!BI_TRY_LOCK(&bi_pool.lock)) {
        bi_pool.count = 0;
        bi_pool.held = 0;
    }
    BI_UNLOCK(&bi_pool.lock);
}

#endif
